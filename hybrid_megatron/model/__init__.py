"""Recipe -> layer plan -> module specs -> model."""
