select hapax.take_handshake($1, $2, $3)
