"""Small trainings that `fewbit demo` and `fewbit calibrate --demo` show, and that studies are built on."""
