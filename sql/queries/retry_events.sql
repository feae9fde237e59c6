select hapax.retry($1, $2, $3, $4) as outcomes
