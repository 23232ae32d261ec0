"""What most people train, ready to run: supervised, by preferences, by reinforcement.

They are the commands `paceline sft`, `dpo` and `rl`, and use the public client alone: read one to write your own.
"""
