"""The queue of steps that a device has not finished."""

from jaxdp.engine.in_flight import InFlightQueue, num_in_flight


def test_bytes_in_flight_are_bounded():
    waited, flight = [], InFlightQueue()
    flight.wait, flight.max_bytes = waited.append, 50
    for number, nbytes in enumerate([20, 20, 20, 60, 60, 60, 1, 1, 1]):
        flight.add(number, nbytes)
    assert waited == [0, 1, 2, 3, 4, 5]  # at least two stay in flight
    assert num_in_flight(0, 1000) == 8
