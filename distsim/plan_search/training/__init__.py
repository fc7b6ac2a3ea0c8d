"""What a whole training takes on clusters that were searched: time, cost, energy, failures."""
