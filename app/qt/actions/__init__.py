"""All commands in the app as data: one table feeds the menus, shortcuts, command palette and shortcut list.

A page or panel declares its actions as a tuple next to the widget that runs them, and registers both once:

    from app.qt.actions.commands import Action
    from app.qt.widgets import QT_TRANSLATE_NOOP

    ACTIONS = (
        Action("images.next", QT_TRANSLATE_NOOP("Action", "Next image"), "images", "next", keys=("Right",)),
        Action("images.reject", QT_TRANSLATE_NOOP("Action", "Reject"), "images", "reject", keys=("X",),
               enabled="has_selection", icon="reject"),
    )

    class Grid(QWidget):
        def __init__(self, session, commands):        # commands: app.qt.actions.commands.Commands
            ...
            commands.add(ACTIONS, self)               # runs self.next(), self.reject(); checks self.has_selection()

The id never changes, because the user's shortcuts are stored under it. An action is enabled while its owner is visible
and the attribute named by `enabled` is true; `commands.refresh()` checks this again (the window calls it when the view
or the selection changes).
For a button use `commands.button("images.reject")`: text, icon, tooltip, shortcut and state follow the action.
A single letter is safe as a shortcut, because a focused text field gets the key first.
"""
