"""What every kernel folder shares: device questions, softmax, strides."""
