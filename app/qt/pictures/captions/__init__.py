"""The caption editor: tags as chips and free text over one caption, changes of many, and what keeps them safe."""
