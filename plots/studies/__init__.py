"""Studies: the trainings and measurements whose data the figures show. They need torch."""
