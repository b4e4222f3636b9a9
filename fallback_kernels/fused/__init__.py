"""The whole attention core as one operator; its stages are in `schedule`."""
