"""The journal of a run: every command on the volume before it is executed, so that a killed process loses none."""
