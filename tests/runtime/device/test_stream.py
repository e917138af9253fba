from runtime.device.stream import HostStream, Stream


def test_the_hosts_stream_has_nothing_to_wait_for() -> None:
    stream: Stream = HostStream()
    stream.synchronize()
