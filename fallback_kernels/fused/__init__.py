"""The whole attention core as one operator: schedules the stages of all branches."""
