"""What runs on the driver: plan, launch, watch and show."""
