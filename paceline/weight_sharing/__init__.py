"""One copy of a base model, shared by trainer and sampler on one machine (bridge `shared`)."""
