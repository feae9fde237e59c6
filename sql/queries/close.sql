select hapax.close($1, $2, $3) as generation
