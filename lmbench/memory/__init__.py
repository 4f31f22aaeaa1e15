"""Where the memory goes: the contents of a peak, predicted before a run or read from its recorded history."""
