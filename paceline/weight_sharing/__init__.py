"""One copy of a base model for trainer and sampler on one machine (bridge `shared`)."""
