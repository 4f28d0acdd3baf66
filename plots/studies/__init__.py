"""Studies: the trainings and measurements that produce the data of the figures. They need torch."""
