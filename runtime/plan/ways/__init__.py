"""Ways to save memory that change a step as a whole, a file each: what they change, measure and cost, and how they are
carried out."""
