"""Which op goes where, and what is kept: partitioners of Functions and of joint forward-backward graphs."""
