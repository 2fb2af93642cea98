"""The page of `subquad report`, from the records of runs alone."""
