"""The optimizers: what they are called and take (specs), and one file for each way to step."""
