"""Figures: functions from data to a matplotlib `Figure`, one file per figure."""
