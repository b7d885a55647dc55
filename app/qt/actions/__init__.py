"""Every command of the app as data: one table feeds menus, shortcuts, the command palette and the sheet of keys.

A room declares what it offers as a tuple, beside the widget that does it, and hands both over once:

    from app.qt.actions.commands import Action
    from app.qt.widgets import QT_TRANSLATE_NOOP

    ACTIONS = (
        Action("pictures.next", QT_TRANSLATE_NOOP("Action", "Next picture"), "pictures", "next", keys=("Right",)),
        Action("pictures.reject", QT_TRANSLATE_NOOP("Action", "Reject"), "pictures", "reject", keys=("X",),
               enabled="has_selection", icon="reject"),
    )

    class Grid(QWidget):
        def __init__(self, session, commands):        # commands: app.qt.actions.commands.Commands
            ...
            commands.add(ACTIONS, self)               # runs self.next(), self.reject(); asks self.has_selection()

The id never changes, because it names the user's own shortcut on disk. An action is available while its owner is
visible and what `enabled` names gives True; `commands.refresh()` asks again (the window does so when the view or its
selection change).
For a button use `commands.button("pictures.reject")`: text, icon, tip, key and state follow.
A single letter as key does not get in the way of typing: a text field that has the focus takes it first.
"""
