"""What a run is, and the policies of its attempts: functions of events and time, without I/O."""
