"""What can be measured: cases, targets, inputs, and the registry of presets."""
