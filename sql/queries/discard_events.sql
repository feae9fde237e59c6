select hapax.discard($1, $2, $3, $4, $5, $6) as outcomes
