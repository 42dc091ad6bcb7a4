"""Which nodes hold which experts, and the moves that lead there: `place.place_experts` is the way in. Pure."""
