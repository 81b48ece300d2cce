"""Training text of the bundled models, generated from seeded templates.

The module `patterns` parses the topic files and expands templates. Most modules draw single
questions with their answers, and `memory` draws dialogues. The module `noise` varies how the questions are typed. The
module `systems` draws system prompts with their effect on answers. Finally `chat` combines all of them into
conversations and documents.
"""
