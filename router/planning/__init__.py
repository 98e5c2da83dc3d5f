"""What the planner knows: loads, capacities, forecasts, and how its counts are damped. Pure."""
