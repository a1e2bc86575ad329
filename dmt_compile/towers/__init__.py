"""Tower modules (section 3.2 of the paper): what a tower makes of its features before they cross hosts."""
