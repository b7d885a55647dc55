"""The app's user interface: Qt widgets on top of `app.core`."""
