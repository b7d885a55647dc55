"""All that the app knows and does, without a window: no Qt in here, and no torch anywhere in the app."""
