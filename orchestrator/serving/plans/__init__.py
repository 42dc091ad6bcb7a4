"""From a wish for a model to a plan for it: what nodes have and can hold, who takes part, what it would take."""
