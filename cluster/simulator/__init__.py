"""A cluster in virtual time: production's router, scheduler, block pool and retry rules; only computing and copying are models."""
