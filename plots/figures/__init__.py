"""Figures: functions from data to a matplotlib `Figure`, a file a figure."""
