"""The events that TensorBoard shows of the files in a folder."""


def events(folder):
    """Steps, tags and values: where a run starts again, nothing of later steps."""
    from tensorboard.backend.event_processing import event_file_loader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    shown = set()
    # The names end with a counter of the process, which sorts 10 before 9.
    for path in sorted(
        folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns
    ):
        for event in event_file_loader.EventFileLoader(str(path)).Load():
            if event.session_log.status == SessionLog.START:
                shown = {value for value in shown if value[0] < event.step}
            shown |= {
                (event.step, value.tag, value.tensor.float_val[0])
                for value in event.summary.value
                if value.tensor.float_val  # texts and pictures have none
            }
    return sorted(shown)
