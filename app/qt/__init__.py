"""What people see of the app: Qt widgets over `app.core`."""
