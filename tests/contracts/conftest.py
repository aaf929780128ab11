from support.engine_fixtures import guesses_in_parts, no_thread_is_left

__all__ = ["guesses_in_parts", "no_thread_is_left"]
