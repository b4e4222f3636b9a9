"""Launch plans: what an operator does on the device, recorded once and replayed."""
