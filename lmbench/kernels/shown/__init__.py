"""What profiled runs and traces tell: tables, columns and charts of kernels, what they attain, a step's timeline."""
