"""Makes the socket calls of typical applications and prints their results.

The same must be printed on the kernel and on Tidegate. `calls.py peer ADDRESS`
is the peer, on the kernel: a connection to its port 7000 sends it orders.
`calls.py subject OWN PEER [PART ...]` makes the calls. Nothing sleeps: each wait is a call that
returns when the expected event has happened.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import termios
import threading
import time

# Of Linux, not defined by every Python.
IP_RECVTTL, IP_RECVTOS, SO_TIMESTAMP, SO_TIMESTAMPNS = 12, 13, 29, 35
CONTROL = 7000
LIMIT = 20


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def mark(udp, hop_limit, traffic_class):
    """Sets hop limit and traffic class of the datagrams that a socket sends."""
    if udp.family == socket.AF_INET6:
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, hop_limit)
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, traffic_class)
    else:
        udp.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hop_limit)
        udp.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, traffic_class)


def request_marks(udp):
    """Requests hop limit and traffic class of received datagrams as control messages."""
    if udp.family == socket.AF_INET6:
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1)
    else:
        udp.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
        udp.setsockopt(socket.IPPROTO_IP, IP_RECVTOS, 1)


# The peer.


def order(connection, address):
    """Executes one order line of the subject, then closes the connection."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            return
        line += byte
    words = line.split()
    if words[0] == b"echo":
        while data := connection.recv(65536):
            connection.sendall(data)
    elif words[0] == b"give":
        connection.sendall(bytes(int(words[1])))
        connection.recv(1)
    elif words[0] == b"pieces":
        # The subject requests each piece.
        for piece in words[1:]:
            connection.recv(1)
            connection.sendall(piece)
        connection.recv(1)
    elif words[0] == b"hold":
        # Reads nothing until the subject has closed.
        gone = select.poll()
        gone.register(connection, select.POLLRDHUP)
        gone.poll(LIMIT * 1000)
    elif words[0] == b"count":
        total = 0
        while data := connection.recv(65536):
            total += len(data)
        connection.sendall(b"%d" % total)
    elif words[0] == b"late":
        # Connects back, reads as many bytes as ordered there, and reports the count there.
        with socket.create_connection((address, int(words[1])), LIMIT) as back:
            wanted, total = int(back.recv(100)), 0
            connection.settimeout(LIMIT)
            try:
                while total < wanted:
                    total += len(connection.recv(65536))
            except TimeoutError:
                pass
            back.sendall(b"%d" % total)
    elif words[0] == b"reset":
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif words[0] == b"resets":
        # Connects back, reads nothing here, and resets when it is told to there.
        with socket.create_connection((address, int(words[1])), LIMIT) as back:
            back.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    elif words[0] == b"resets_half":
        # Connects back, ends its data here, and resets when it is told to there.
        with socket.create_connection((address, int(words[1])), LIMIT) as back:
            connection.shutdown(socket.SHUT_WR)
            back.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    elif words[0] == b"seen":
        # Connects back, sends data here, and reports there how the connection ends.
        with socket.create_connection((address, int(words[1])), LIMIT) as back:
            connection.settimeout(LIMIT)
            connection.sendall(b"unread")
            try:
                back.sendall(b"data" if connection.recv(1) else b"end")
            except ConnectionResetError:
                back.sendall(b"reset")
    elif words[0] == b"held":
        # Connects back, reads nothing here, and reports there how many bytes have arrived.
        with socket.create_connection((address, int(words[1])), LIMIT) as back:
            back.recv(1)
            arrived = array.array("i", [0])
            fcntl.ioctl(connection, termios.FIONREAD, arrived)
            back.sendall(b"%d" % arrived[0])
    elif words[0] == b"call":
        # Connects back, sends each text and waits for the end of the connection.
        for text in words[2:]:
            with socket.create_connection((address, int(words[1])), LIMIT) as back:
                back.sendall(text)
                back.shutdown(socket.SHUT_WR)
                while back.recv(65536):
                    pass
        connection.sendall(b".")
    elif words[0] == b"silent":
        # Connects back, and sends there what it is told to here, or only the end of data.
        with socket.create_connection((address, int(words[1])), LIMIT) as back:
            connection.sendall(b".")
            back.sendall(connection.recv(100))
            back.shutdown(socket.SHUT_WR)
            while back.recv(65536):
                pass
    elif words[0] == b"datagrams":
        with socket.socket(family(address), socket.SOCK_DGRAM) as back:
            for text in words[2:]:
                back.sendto(text, (address, int(words[1])))
            connection.sendall(b".")
            connection.recv(1)
    elif words[0] == b"marked":
        # A datagram with a hop limit and a traffic class of its own.
        with socket.socket(family(address), socket.SOCK_DGRAM) as back:
            mark(back, 33, 0xB8)
            back.sendto(b"marked", (address, int(words[1])))
            connection.sendall(b".")
            connection.recv(1)
    elif words[0] == b"marks":
        # Receives a datagram, and reports its hop limit and traffic class.
        with socket.socket(family(address), socket.SOCK_DGRAM) as udp:
            udp.settimeout(LIMIT)
            udp.bind((connection.getsockname()[0], 0))
            request_marks(udp)
            connection.sendall(b"%d" % udp.getsockname()[1])
            for _ in range(int(words[1])):
                notes = udp.recvmsg(100, 200)[1]
                connection.sendall(b" ".join(b"%d" % raw[0] for _, _, raw in notes))
    elif words[0] == b"sizes":
        # Receives datagrams up to an empty one, and reports their sizes.
        with socket.socket(family(address), socket.SOCK_DGRAM) as udp:
            udp.settimeout(LIMIT)
            udp.bind((connection.getsockname()[0], 0))
            connection.sendall(b"%d" % udp.getsockname()[1])
            while True:
                sizes = []
                while data := udp.recv(65536):
                    sizes.append(len(data) if data == data[:1] * len(data) else -1)
                connection.sendall(str(sizes).encode())
    elif words[0] == b"many":
        # Datagrams of 1,000 bytes.
        with socket.socket(family(address), socket.SOCK_DGRAM) as back:
            for _ in range(int(words[2])):
                back.sendto(bytes(1000), (address, int(words[1])))
            connection.sendall(b".")
            connection.recv(1)
    elif words[0] == b"flows":
        # Datagrams, each from a source port of its own.
        for number in range(int(words[2])):
            with socket.socket(family(address), socket.SOCK_DGRAM) as back:
                back.sendto(b"%d" % number, (address, int(words[1])))
        connection.sendall(b".")


def peer(own, subject):
    # Each datagram to a port without a socket is answered.
    for limit in "ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit":
        with open("/proc/sys/net/" + limit, "w") as setting:
            setting.write("0")
    listener = socket.create_server((own, CONTROL), family=family(own), backlog=64)
    udp = socket.socket(family(own), socket.SOCK_DGRAM)
    udp.bind((own, CONTROL))

    def echo_datagrams():
        while True:
            data, sender = udp.recvfrom(65536)
            udp.sendto(data, sender)

    threading.Thread(target=echo_datagrams, daemon=True).start()
    print("ready", flush=True)

    def serve(connection):
        with connection:
            try:
                order(connection, subject)
            except OSError:
                pass

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


# The subject: the side under test.


class Subject:
    def __init__(self, own, peer):
        self.own, self.peer = own, peer
        self.family = family(own)

    def order_peer(self, text):
        """Returns a connection on which the peer executes this order."""
        connection = socket.create_connection((self.peer, CONTROL), LIMIT)
        connection.settimeout(None)
        connection.sendall(text.encode() + b"\n")
        return connection

    def listener(self, port=0):
        listener = socket.socket(self.family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.own, port))
        listener.listen(16)
        return listener

    def called_listener(self, *texts):
        """Returns a listener to which the peer connects, and the order's connection."""
        listener = self.listener()
        port = listener.getsockname()[1]
        return listener, self.order_peer(" ".join(["call", str(port), *texts]))


def names(events):
    words = ["IN", "OUT", "ERR", "HUP", "RDHUP"]
    return "|".join(word for word in words if events & getattr(select, "EPOLL" + word)) or "0"


def error_name(number):
    return errno.errorcode.get(number, number)


def code(call, *arguments):
    """Returns the result of a call, or the name of its error."""
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


class TcpInfo:
    """Fields of `TCP_INFO`."""

    def __init__(self, connection):
        raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
        (self.state, self.ca_state, self.retransmits, _, self.backoff, self.options, self.shifts,
         _) = raw[:8]
        (self.rto, _, self.snd_mss, _, self.unacked, self.sacked, self.lost, self.retrans, _, _, _,
         _, _, _, _, self.rtt, self.rttvar, _, self.cwnd, _, _, _, _,
         self.total_retrans) = struct.unpack_from("=24I", raw, 8)
        self.acked, self.received = struct.unpack_from("=QQ", raw, 120)
        self.sent_segments, self.received_segments, self.unsent, self.min_rtt = struct.unpack_from("=4I", raw, 136)
        (self.delivery_rate,) = struct.unpack_from("=Q", raw, 160)
        (self.peer_window,) = struct.unpack_from("=I", raw, 228)


def fill(connection):
    """Sends until the peer's window is closed, so that data waits."""
    connection.setblocking(False)
    while True:
        try:
            connection.send(bytes(65536))
        except BlockingIOError:
            info = TcpInfo(connection)
            if info.unsent and not info.unacked and info.peer_window < info.snd_mss:
                return
            select.select([connection], [], [], 0)


def blocking(subject):
    with subject.order_peer("echo") as connection:
        connection.sendall(b"hello")
        yield connection.recv(100)
        yield connection.send(b"")
        yield connection.getpeername()[1] == CONTROL
        yield connection.getsockname()[0] == subject.own
        connection.shutdown(socket.SHUT_WR)
        yield connection.recv(100)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        yield code(connection.send, b"more")


def whole_and_peeked(subject):
    with subject.order_peer("pieces abc defgh") as connection:
        connection.sendall(b"1")
        yield connection.recv(2, socket.MSG_PEEK)
        yield connection.recv(2)
        connection.sendall(b"2")
        yield connection.recv(6, socket.MSG_WAITALL)
        yield code(connection.recv, 1, socket.MSG_DONTWAIT)


def vectors(subject):
    with subject.order_peer("echo") as connection:
        yield connection.sendmsg([b"one ", b"two ", b"three"])
        got = bytearray()
        while len(got) < 13:
            first, second = bytearray(3), bytearray(100)
            count, _, flags, _ = connection.recvmsg_into([first, second])
            got += (bytes(first) + bytes(second))[:count]
        yield bytes(got), flags
        yield os.writev(connection.fileno(), [b"a", b"b"])
        yield os.read(connection.fileno(), 1)


def nonblocking_connect(subject):
    connection = socket.socket(subject.family)
    connection.setblocking(False)
    yield error_name(connection.connect_ex((subject.peer, CONTROL)))
    _, writable, _ = select.select([], [connection], [], LIMIT)
    yield len(writable), connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    yield code(connection.recv, 1)
    yield error_name(connection.connect_ex((subject.peer, CONTROL)))
    yield error_name(connection.connect_ex((subject.peer, CONTROL)))
    connection.close()


def refused(subject):
    connection = socket.socket(subject.family)
    yield code(connection.connect, (subject.peer, 1))
    connection.close()
    connection = socket.socket(subject.family)
    connection.setblocking(False)
    connection.connect_ex((subject.peer, 1))
    poll = select.epoll()
    poll.register(connection, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
    yield [names(events) for _, events in poll.poll(LIMIT)]
    yield error_name(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    yield connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def reset(subject):
    with subject.order_peer("reset") as connection:
        connection.sendall(b"1")
        yield code(connection.recv, 1)
        yield code(connection.send, b"x")


def reset_with_unsent_data(subject):
    with subject.listener() as listener:
        with subject.order_peer(f"resets {listener.getsockname()[1]}") as connection:
            with listener.accept()[0] as back:
                connection.setblocking(False)
                try:
                    while True:
                        connection.send(bytes(65536))
                except BlockingIOError:
                    pass
                back.sendall(b"1")
                connection.setblocking(True)
                yield code(connection.recv, 1)
                yield code(connection.recv, 1)
                yield code(connection.send, b"x")


@contextlib.contextmanager
def half_closed(subject):
    """A connection whose peer has ended its data and resets at the first byte, the listener's end that
    tells the peer so, and an empty set."""
    with subject.listener() as listener, select.epoll() as poll:
        with subject.order_peer(f"resets_half {listener.getsockname()[1]}") as connection:
            with listener.accept()[0] as back:
                yield connection, back, poll


def wait_for_error(poll):
    while not any(bits & select.EPOLLERR for _, bits in poll.poll(LIMIT)):
        pass


def reset_after_end(subject):
    """The peer ends its data and resets, while the connection waits in LAST-ACK here."""
    with half_closed(subject) as (connection, back, poll):
        yield connection.recv(1)
        fill(connection)
        connection.shutdown(socket.SHUT_WR)
        poll.register(connection, 0)
        yield [names(bits) for _, bits in poll.poll(LIMIT)]
        back.sendall(b"1")
        wait_for_error(poll)
        yield error_name(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        yield connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        yield code(connection.recv, 1), code(connection.send, b"x", socket.MSG_NOSIGNAL)


def reset_in_close_wait(subject):
    """The peer ends its data and resets, while the connection may send here."""
    signals = []
    signal.signal(signal.SIGPIPE, lambda *_: signals.append("SIGPIPE"))
    send, receive = lambda one: code(one.send, b"x"), lambda one: code(one.recv, 1)
    pending = lambda one: error_name(one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    for calls in (send, send), (pending, send, pending), (receive, pending, receive), (receive, send, pending):
        with half_closed(subject) as (connection, back, poll):
            yield connection.recv(1)
            poll.register(connection, 0)
            back.sendall(b"1")
            yield [names(bits) for _, bits in poll.poll(LIMIT)]
            yield [call(connection) for call in calls], signals
            signals.clear()
    # The end of the peer's data stays the end of what is read, whatever error follows.
    with half_closed(subject) as (connection, back, poll):
        yield connection.recv(1)
        fill(connection)
        connection.shutdown(socket.SHUT_WR)
        poll.register(connection, 0)
        back.sendall(b"1")
        wait_for_error(poll)
        yield receive(connection), pending(connection), pending(connection)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def exclusive_members(subject):
    exclusive = select.EPOLLEXCLUSIVE
    with subject.order_peer("pieces abc") as connection, select.epoll() as poll, select.epoll() as other:
        for events in select.EPOLLRDHUP, select.EPOLLONESHOT, select.EPOLLPRI:
            yield code(poll.register, connection, select.EPOLLIN | exclusive | events)
        yield code(poll.register, connection, select.EPOLLIN | select.EPOLLET | exclusive)
        yield code(poll.modify, connection, select.EPOLLIN)
        yield code(poll.modify, connection, select.EPOLLIN | exclusive)
        yield code(poll.register, connection, select.EPOLLIN | exclusive)
        yield code(other.register, connection, select.EPOLLIN)
        yield code(other.modify, connection, select.EPOLLIN | exclusive)
        yield code(other.register, poll, select.EPOLLIN | exclusive)
        connection.sendall(b"1")
        yield [names(bits) for _, bits in poll.poll(LIMIT)], connection.recv(100)
        poll.unregister(connection)
        yield code(poll.register, connection, select.EPOLLIN)


def closed_with_unread_data(subject):
    with subject.listener() as listener:
        connection = subject.order_peer(f"seen {listener.getsockname()[1]}")
        with listener.accept()[0] as back:
            yield connection.recv(10, socket.MSG_PEEK)
            connection.close()
            yield back.recv(10)
        connection = subject.order_peer(f"seen {listener.getsockname()[1]}")
        with listener.accept()[0] as back:
            yield connection.recv(10)
            connection.close()
            yield back.recv(10)


def level_triggered(subject):
    with subject.order_peer("pieces abc de") as connection, select.epoll() as poll:
        poll.register(connection, select.EPOLLIN)
        yield poll.poll(0)
        connection.sendall(b"1")
        yield [names(events) for _, events in poll.poll(LIMIT)]
        connection.recv(1)
        yield [names(events) for _, events in poll.poll(LIMIT)]
        connection.recv(10)
        yield poll.poll(0)
        poll.modify(connection, select.EPOLLIN | select.EPOLLOUT)
        yield [names(events) for _, events in poll.poll(LIMIT)]
        poll.modify(connection, 0)
        yield poll.poll(0)
        yield code(poll.register, connection, select.EPOLLIN)
        poll.unregister(connection)
        yield code(poll.unregister, connection)


def edge_triggered(subject):
    with subject.order_peer("pieces abc de") as connection, subject.order_peer("echo") as other, select.epoll() as poll:
        poll.register(connection, select.EPOLLIN | select.EPOLLET)
        connection.sendall(b"1")
        # An attached program can see data before the notification of it, but not before that of a later answer.
        connection.recv(3, socket.MSG_PEEK | socket.MSG_WAITALL)
        other.sendall(b".")
        other.recv(1)
        yield [names(events) for _, events in poll.poll(LIMIT)]
        yield poll.poll(0)
        connection.sendall(b"2")
        yield [names(events) for _, events in poll.poll(LIMIT)]
        yield connection.recv(5, socket.MSG_WAITALL)
        yield code(connection.recv, 1, socket.MSG_DONTWAIT), poll.poll(0)


def one_shot(subject):
    with subject.order_peer("pieces abc de") as connection, select.epoll() as poll:
        poll.register(connection, select.EPOLLIN | select.EPOLLONESHOT)
        connection.sendall(b"1")
        yield [names(events) for _, events in poll.poll(LIMIT)]
        yield poll.poll(0)
        poll.modify(connection, select.EPOLLIN | select.EPOLLONESHOT)
        yield [names(events) for _, events in poll.poll(LIMIT)]
        yield poll.poll(0)


def duplicate_members(subject):
    """Two descriptors of one connection in one set, each with events of its own."""
    with subject.order_peer("pieces abc de") as connection, select.epoll() as poll:
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            roles = {connection.fileno(): "first", copy.fileno(): "second"}
            once = select.EPOLLOUT | select.EPOLLONESHOT
            poll.register(connection, select.EPOLLIN)
            yield code(poll.register, copy, once), code(poll.register, copy, once)
            ready = lambda: sorted((roles[fd], names(events)) for fd, events in poll.poll(LIMIT))
            yield ready()
            connection.sendall(b"1")
            yield ready()
            poll.modify(copy, select.EPOLLIN | once)
            yield ready()
            poll.modify(copy, select.EPOLLIN)
            poll.unregister(connection)
            yield ready()
            poll.unregister(copy)
            yield poll.poll(0)


def ends(subject):
    with subject.order_peer("give 3") as connection, select.epoll() as poll:
        poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        connection.recv(3, socket.MSG_WAITALL)
        connection.sendall(b"1")
        yield [names(events) for _, events in poll.poll(LIMIT)]
        yield connection.recv(1)
        connection.shutdown(socket.SHUT_WR)
        yield [names(events) for _, events in poll.poll(LIMIT)]


def nested_and_mixed(subject):
    inner, outer = select.epoll(), select.epoll()
    reader, writer = os.pipe()
    with subject.order_peer("pieces abc") as connection:
        inner.register(connection, select.EPOLLIN)
        outer.register(inner.fileno(), select.EPOLLIN)
        outer.register(reader, select.EPOLLIN)
        yield outer.poll(0)
        os.write(writer, b"x")
        yield [fd == reader for fd, _ in outer.poll(LIMIT)]
        os.read(reader, 1)
        connection.sendall(b"1")
        yield [fd == inner.fileno() for fd, _ in outer.poll(LIMIT)]
        yield [fd == connection.fileno() for fd, _ in inner.poll(0)]
        poll = select.poll()
        for fd in (reader, connection, inner.fileno()):
            poll.register(fd, select.POLLIN)
        yield sorted(names(events) for _, events in poll.poll(LIMIT * 1000))
        os.write(writer, b"x")
        readable, _, _ = select.select([reader, connection], [], [], LIMIT)
        yield len(readable)


def accepting(subject):
    listener, orders = subject.called_listener("first", "second")
    listener.setblocking(False)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    for _ in range(2):
        yield [names(events) for _, events in poll.poll(LIMIT)]
        connection, sender = listener.accept()
        connection.setblocking(True)
        yield sender[0] == subject.peer, connection.recv(100), connection.recv(100)
        yield connection.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        connection.close()
    yield orders.recv(1)
    yield code(listener.accept)
    yield listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    yield code(listener.recv, 1)
    port = listener.getsockname()[1]
    other = socket.socket(subject.family)
    yield code(other.bind, (subject.own, port))


def deferred(subject):
    """A listener whose connections wait for data (`TCP_DEFER_ACCEPT`)."""
    option = socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT
    for sets_early in True, False:
        with socket.socket(subject.family) as listener, select.epoll() as poll:
            listener.bind((subject.own, 0))
            if sets_early:
                listener.setsockopt(*option, 20)
            listener.listen(16)
            if not sets_early:
                listener.setsockopt(*option, 20)
            yield listener.getsockopt(*option)
            listener.setblocking(False)
            poll.register(listener, select.EPOLLIN)
            for data in b"text", b"":
                with subject.order_peer(f"silent {listener.getsockname()[1]}") as orders:
                    yield orders.recv(1), code(listener.accept), poll.poll(0)
                    if data:
                        orders.sendall(data)
                    else:
                        orders.shutdown(socket.SHUT_WR)
                    yield [names(bits) for _, bits in poll.poll(LIMIT)]
                    with listener.accept()[0] as connection:
                        connection.setblocking(True)
                        yield connection.recv(100, socket.MSG_WAITALL)
            # A connection that has no data when the time is over.
            listener.setsockopt(*option, 1)
            with subject.order_peer(f"silent {listener.getsockname()[1]}") as orders:
                start = time.monotonic()
                yield orders.recv(1), [names(bits) for _, bits in poll.poll(LIMIT)]
                yield time.monotonic() - start > 0.5
                with listener.accept()[0] as connection:
                    connection.setblocking(False)
                    yield code(connection.recv, 1)
            listener.setsockopt(*option, 0)
            with subject.order_peer(f"silent {listener.getsockname()[1]}") as orders:
                yield [names(bits) for _, bits in poll.poll(LIMIT)]
                listener.accept()[0].close()


def stopped_listener(subject):
    with subject.listener() as listener:
        port = listener.getsockname()[1]
        listener.shutdown(socket.SHUT_WR)
        with subject.order_peer(f"call {port} first") as orders:
            yield listener.accept()[0].recv(100), orders.recv(1)
        listener.shutdown(socket.SHUT_RDWR)
        yield code(listener.accept)
        # The peer cannot connect.
        with subject.order_peer(f"call {port} second") as orders:
            yield orders.recv(1)


def duplicates(subject):
    with subject.order_peer("echo") as connection:
        copy = os.dup(connection.fileno())
        other = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 100)
        connection.close()
        os.write(copy, b"hello")
        yield os.read(other, 100)
        yield fcntl.fcntl(other, fcntl.F_GETFD), other >= 100
        os.dup2(copy, other)
        os.close(copy)
        os.write(other, b"again")
        yield os.read(other, 100)
        os.close(other)
        yield code(os.read, other, 1)


def descriptors(subject):
    def echoes(connection):
        connection.sendall(b".")
        return connection.recv(1)

    with subject.order_peer("echo") as connection, open("/dev/null") as null:
        # The next number, all beyond the last one, and a chosen number are the program's.
        last = null.fileno()
        yield last, connection.fileno()
        libc = ctypes.CDLL(None, use_errno=True)
        yield libc.close_range(last + 1, 2**32 - 1, 0), echoes(connection)
        libc.closefrom(last + 1)
        yield echoes(connection)
        highest = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        yield [fd for fd in range(last + 1, min(highest, 100_000)) if libc.close(fd) == 0]
        yield echoes(connection)
        yield libc.dup(last) == last + 1, libc.close(last + 1), echoes(connection)


def files(subject):
    with tempfile.TemporaryFile() as file, subject.order_peer("count") as connection:
        file.write(bytes(300_000))
        file.flush()
        sent = 0
        while sent < 200_000:
            sent += os.sendfile(connection.fileno(), file.fileno(), sent, 200_000 - sent)
        connection.shutdown(socket.SHUT_WR)
        yield connection.recv(100)


def corked(subject):
    with subject.order_peer("count") as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.sendall(b"head")
        connection.sendall(bytes(5000))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        connection.send(b"more", socket.MSG_MORE)
        connection.sendall(b"last")
        connection.shutdown(socket.SHUT_WR)
        yield connection.recv(100)


def corked_and_waiting(subject):
    """What is held back goes out after a while, though nothing follows."""
    with subject.order_peer("echo") as connection:
        for flags in 0, socket.MSG_MORE:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, flags == 0)
            connection.send(b"held", flags)
            readable, _, _ = select.select([connection], [], [], LIMIT)
            yield len(readable), connection.recv(100)


def full(subject):
    with subject.order_peer("hold") as connection:
        connection.setblocking(False)
        sent = 0
        try:
            while True:
                sent += connection.send(bytes(65536))
        except BlockingIOError:
            yield sent > 0
        with select.epoll() as poll:
            poll.register(connection, select.EPOLLOUT)
            yield poll.poll(0)


def corked_and_full(subject):
    with subject.listener() as listener:
        with subject.order_peer(f"late {listener.getsockname()[1]}") as connection:
            with listener.accept()[0] as back:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
                connection.setblocking(False)
                sent = 0
                for size in (65536, 100):
                    try:
                        while True:
                            sent += connection.send(bytes(size))
                    except BlockingIOError:
                        pass
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
                back.sendall(b"%d" % sent)
                yield int(back.recv(100)) == sent


def lingering(subject):
    """Closing waits as long as is set for data that the peer does not take."""
    for shut in (), (socket.SHUT_WR,):
        with subject.listener() as listener:
            connection = subject.order_peer(f"held {listener.getsockname()[1]}")
            with listener.accept()[0] as back:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1))
                connection.setblocking(False)
                sent = 0
                # A daemon may have taken what filled the connection.
                while select.select([], [connection], [], 0.1)[1]:
                    try:
                        sent += connection.send(bytes(65536))
                    except BlockingIOError:
                        pass
                for how in shut:
                    connection.shutdown(how)
                start = time.monotonic()
                connection.close()
                waited = time.monotonic() - start >= 1
                back.sendall(b".")
                yield waited or int(back.recv(100)) == sent


def options(subject):
    with subject.order_peer("pieces abc") as connection:
        get, set_ = connection.getsockopt, connection.setsockopt
        yield get(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        yield get(socket.SOL_SOCKET, socket.SO_DOMAIN) == subject.family
        yield get(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP
        for level, name, value in [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 9000),
        ]:
            set_(level, name, value)
            yield get(level, name)
        yield code(set_, socket.SOL_SOCKET, 9999, 1)
        yield get(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0]
        connection.sendall(b"1")
        select.select([connection], [], [], LIMIT)
        waiting = array.array("i", [0])
        fcntl.ioctl(connection, termios.FIONREAD, waiting)
        yield waiting[0]
        set_(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 20_000))
        connection.settimeout(None)
        yield connection.recv(100), code(connection.recv, 1)
        flags = fcntl.fcntl(connection, fcntl.F_GETFL)
        fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        yield code(os.read, connection.fileno(), 1)


def interrupted(subject):
    waits = []

    def interrupt(*_):
        # The exception keeps Python from making the call again.
        if waits:
            raise IndexError(waits.pop())

    signal.signal(signal.SIGALRM, interrupt)
    with subject.order_peer("pieces abc") as connection, select.epoll() as poll:
        poll.register(connection, select.EPOLLIN)
        for wait in (
            lambda: connection.recv(1),
            lambda: poll.poll(LIMIT),
            lambda: select.select([connection], [], [], LIMIT),
        ):
            connection.settimeout(None)
            # Again and again, since a signal may come before the call.
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            try:
                waits.append(wait)
                yield wait()
            except IndexError:
                yield "interrupted"
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def datagrams(subject):
    udp = socket.socket(subject.family, socket.SOCK_DGRAM)
    udp.settimeout(LIMIT)
    yield udp.sendto(b"hello", (subject.peer, CONTROL))
    yield udp.recvfrom(3)[0]
    udp.connect((subject.peer, CONTROL))
    yield udp.getpeername()[1], udp.getsockname()[0] == subject.own
    yield udp.send(b"again")
    select.select([udp], [], [], LIMIT)
    yield udp.recv(2, socket.MSG_PEEK), len(udp.recv(2, socket.MSG_TRUNC | socket.MSG_PEEK))
    data, _, flags, sender = udp.recvmsg(2)
    yield data, bool(flags & socket.MSG_TRUNC), sender[0] == subject.peer
    udp.setblocking(False)
    yield code(udp.recv, 1)


def bound_datagrams(subject):
    any_address = "::" if subject.family == socket.AF_INET6 else "0.0.0.0"
    udp = socket.socket(subject.family, socket.SOCK_DGRAM)
    udp.bind((any_address, 7001))
    if subject.family == socket.AF_INET6:
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    else:
        udp.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_PKTINFO", 8), 1)
    poll = select.epoll()
    poll.register(udp, select.EPOLLIN)
    with subject.order_peer("datagrams 7001 one two") as orders:
        yield orders.recv(1)
        for _ in range(2):
            yield len(poll.poll(LIMIT))
            data, notes, _, _ = udp.recvmsg(100, 200)
            level, kind, raw = notes[0]
            at, size = (0, 16) if subject.family == socket.AF_INET6 else (8, 4)
            own = socket.inet_ntop(subject.family, raw[at : at + size])
            yield data, own == subject.own
    loopback = "::1" if subject.family == socket.AF_INET6 else "127.0.0.1"
    other = socket.socket(subject.family, socket.SOCK_DGRAM)
    other.sendto(b"inside", (loopback, 7001))
    yield len(poll.poll(LIMIT)), udp.recv(100)


def datagrams_to_any_port(subject):
    any_address = "::" if subject.family == socket.AF_INET6 else "0.0.0.0"
    for address in any_address, subject.own:
        with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
            udp.bind((address, 0))
            udp.settimeout(LIMIT)
            port = udp.getsockname()[1]
            with subject.order_peer(f"datagrams {port} one") as orders:
                yield orders.recv(1), udp.recv(100)
            yield code(udp.sendto, b"text", (subject.peer, 0))


def datagrams_to_another_family(subject):
    call = ctypes.CDLL(None, use_errno=True).sendto
    port = socket.htons(9)
    if subject.family == socket.AF_INET:
        address = socket.inet_pton(socket.AF_INET6, "2001:db8::1")
        raw = struct.pack("=HHI16sI", socket.AF_INET6, port, 0, address, 0)
    else:
        raw = struct.pack("=HH4s8x", socket.AF_INET, port, socket.inet_aton("192.0.2.1"))
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        udp.bind((subject.own, 0))
        udp.getsockname()
        for _ in range(2):
            yield call(udp.fileno(), b"text", 4, 0, raw, len(raw)), error_name(ctypes.get_errno())


def shared_datagrams(subject):
    def join(shares=1):
        udp = socket.socket(subject.family, socket.SOCK_DGRAM)
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
        udp.bind((subject.own, 7003))
        return udp

    sockets = [join(), join(), join()]
    yield code(join, 0)
    poll = select.epoll()
    for udp in sockets:
        poll.register(udp, select.EPOLLIN)
    with subject.order_peer("flows 7003 64") as orders:
        yield orders.recv(1)
        got = {udp.fileno(): [] for udp in sockets}
        while sum(map(len, got.values())) < 64:
            for fd, _ in poll.poll(LIMIT):
                got[fd].append(int(os.read(fd, 100)))
    yield sorted(sum(got.values(), [])) == list(range(64)), all(got.values())
    for udp in sockets:
        udp.close()
    join(0).close()
    yield code(join, 1) is not None


def over_loopback(subject):
    any_address = "::" if subject.family == socket.AF_INET6 else "0.0.0.0"
    loopback = "::1" if subject.family == socket.AF_INET6 else "127.0.0.1"
    listener = socket.create_server((any_address, 7002), family=subject.family)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    with socket.create_connection((loopback, 7002), LIMIT) as inside:
        yield len(poll.poll(LIMIT))
        connection, _ = listener.accept()
        inside.sendall(b"inside")
        yield connection.recv(100)
    with subject.order_peer("call 7002 outside") as orders:
        yield len(poll.poll(LIMIT))
        connection, _ = listener.accept()
        yield connection.recv(100)
        connection.close()
        yield orders.recv(1)


def children(subject):
    with subject.order_peer("echo") as connection:
        child = os.fork()
        if child == 0:
            connection.close()
            os._exit(7)
        yield os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(b"still here")
        yield connection.recv(100)


def threads(subject):
    with subject.order_peer("pieces abc") as connection:
        got = []
        reader = threading.Thread(target=lambda: got.append(connection.recv(100)))
        reader.start()
        connection.sendall(b"1")
        reader.join(LIMIT)
        yield got


def wait_until_blocked(thread):
    """Returns when the thread sleeps in a call."""
    while True:
        with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
            if stat.read().rsplit(")", 1)[1].split()[0] == "S":
                return


def in_thread(call, *arguments):
    """Starts a call in a thread that waits in it; returns the thread and the list of results."""
    results = []
    thread = threading.Thread(target=lambda: results.append(code(call, *arguments)), daemon=True)
    thread.start()
    wait_until_blocked(thread)
    return thread, results


def shut_listener(subject):
    any_address = "::" if subject.family == socket.AF_INET6 else "0.0.0.0"
    for address in any_address, subject.own:
        with socket.socket(subject.family) as listener, select.epoll() as poll:
            listener.bind((address, 0))
            listener.listen(16)
            poll.register(listener, select.EPOLLIN)
            waiting = [in_thread(listener.accept), in_thread(poll.poll, LIMIT)]
            yield code(listener.shutdown, socket.SHUT_RDWR)
            for thread, _ in waiting:
                thread.join(LIMIT)
            yield waiting[0][1], [[names(bits) for _, bits in got] for got in waiting[1][1]]
            yield code(listener.listen, 16)
            port = listener.getsockname()[1]
            with subject.order_peer(f"call {port} again") as orders:
                yield listener.accept()[0].recv(100), orders.recv(1)


def shut_datagrams(subject):
    for connects in False, True:
        for how in socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR:
            with socket.socket(subject.family, socket.SOCK_DGRAM) as udp, select.epoll() as poll:
                udp.bind((subject.own, 0))
                if connects:
                    udp.connect((subject.peer, CONTROL))
                if how != socket.SHUT_WR:
                    waiting = in_thread(udp.recv, 100)
                    poll.register(udp, select.EPOLLIN | select.EPOLLRDHUP)
                    ending = in_thread(poll.poll, LIMIT)
                yield code(udp.shutdown, how)
                if how != socket.SHUT_WR:
                    waiting[0].join(LIMIT)
                    ending[0].join(LIMIT)
                    yield waiting[1], [[names(bits) for _, bits in got] for got in ending[1]]
                    udp.setblocking(False)
                    yield code(udp.recv, 100)
                    udp.setblocking(True)
                    yield code(udp.recv, 100)
                yield code(udp.sendto, b"text", (subject.peer, CONTROL))
                if how == socket.SHUT_WR:
                    continue
                if how == socket.SHUT_RD:
                    # What arrives all the same is received.
                    poll.modify(udp, 0)
                    while code(udp.recv, 100, socket.MSG_DONTWAIT | socket.MSG_PEEK) == "EAGAIN":
                        pass
                    yield code(udp.recv, 100)


def shut_connecting(subject):
    # Nobody has this address, so that the connection stays in progress.
    nobody = subject.peer[:-1] + "9"
    with socket.socket(subject.family) as connection, select.epoll() as poll:
        connection.setblocking(False)
        yield code(connection.connect, (nobody, 9))
        poll.register(connection, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
        yield code(connection.shutdown, socket.SHUT_RDWR)
        yield ["OUT" in names(events) and "ERR" in names(events) for _, events in poll.poll(LIMIT)]
        yield error_name(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        connection.setblocking(True)
        yield code(connection.connect, (subject.peer, CONTROL))
    with socket.socket(subject.family) as connection:
        waiting = in_thread(connection.connect, (nobody, 9))
        syn_sent = 2
        while connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != syn_sent:
            pass
        yield code(connection.shutdown, socket.SHUT_RDWR)
        waiting[0].join(LIMIT)
        yield waiting[1]


def shut_reading(subject):
    with subject.order_peer("pieces abc de") as connection, select.epoll() as poll:
        poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        waiting = in_thread(connection.recv, 10)
        yield code(connection.shutdown, socket.SHUT_RD)
        waiting[0].join(LIMIT)
        yield waiting[1], [names(events) for _, events in poll.poll(LIMIT)]
        yield code(connection.recv, 10), code(connection.send, b"1")


def read_end_alone(subject):
    """Waits for the end of the peer's data only, while data is unread."""
    with subject.order_peer("give 3") as connection, select.epoll() as epoll:
        poll = select.poll()
        epoll.register(connection, select.EPOLLRDHUP)
        poll.register(connection, select.POLLRDHUP)
        connection.recv(1)
        yield epoll.poll(0), poll.poll(0)
        connection.sendall(b"1")
        yield [names(events) for _, events in epoll.poll(LIMIT)]
        yield [names(events) for _, events in poll.poll(LIMIT * 1000)]
        epoll.modify(connection, select.EPOLLOUT | select.EPOLLRDHUP)
        yield [names(events) for _, events in epoll.poll(LIMIT)]
        yield connection.recv(10)


def discarding(subject):
    receive = ctypes.CDLL(None, use_errno=True).recv
    with subject.order_peer("pieces abcdefgh ijkl") as connection:
        connection.sendall(b"1")
        connection.recv(8, socket.MSG_PEEK | socket.MSG_WAITALL)
        yield receive(connection.fileno(), None, 2, socket.MSG_TRUNC)
        buffer = ctypes.create_string_buffer(4)
        yield receive(connection.fileno(), buffer, 2, socket.MSG_TRUNC), buffer.raw
        yield connection.recv(1)
        yield receive(connection.fileno(), None, 2**31 - 1, socket.MSG_TRUNC | socket.MSG_DONTWAIT)
        result = receive(connection.fileno(), None, 9, socket.MSG_TRUNC | socket.MSG_DONTWAIT)
        yield result, error_name(ctypes.get_errno())
        connection.sendall(b"2")
        connection.recvmsg(2, 0, socket.MSG_TRUNC)
        yield connection.recv(2)
    with subject.order_peer("give 0") as connection:
        connection.sendall(b"1")
        yield receive(connection.fileno(), None, 9, socket.MSG_TRUNC)


def early_duplicates(subject):
    """Descriptors that were duplicated before their socket listened, connected or sent."""
    with socket.socket(subject.family) as listener:
        listener.bind((subject.own, 0))
        with socket.socket(fileno=os.dup(listener.fileno())) as copy, select.epoll() as poll:
            poll.register(copy, select.EPOLLIN)
            listener.listen(16)
            listener.close()
            with subject.order_peer(f"call {copy.getsockname()[1]} text") as orders:
                yield len(poll.poll(LIMIT)), copy.accept()[0].recv(100), orders.recv(1)
    for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
        with socket.socket(subject.family, kind) as first:
            number = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 100)
            with socket.socket(fileno=number) as second:
                number = os.dup2(first.fileno(), 120)
                with socket.socket(fileno=number) as third:
                    second.connect((subject.peer, CONTROL))
                    third.sendall(b"echo\ntext")
                    yield first.recv(100), third.getpeername()[1], first.getsockname()[0] == subject.own
                    first.close()
                    third.sendall(b"more")
                    yield second.recv(100)


def mapped_addresses(subject):
    """IPv4 addresses on IPv6 sockets."""
    if subject.family == socket.AF_INET6:
        return
    own, peer = "::ffff:" + subject.own, "::ffff:" + subject.peer

    def new(kind, is_bound, only_v6=0):
        one = socket.socket(socket.AF_INET6, kind)
        one.settimeout(LIMIT)
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        if is_bound:
            one.bind((own, 0))
        return one

    with new(socket.SOCK_STREAM, True) as listener:
        listener.listen(16)
        yield listener.getsockname()[0] == own
        with subject.order_peer(f"call {listener.getsockname()[1]} text") as orders:
            connection, sender = listener.accept()
            yield sender[0] == peer, connection.getpeername()[0] == peer
            yield connection.getsockname()[0] == own, connection.recv(100)
            connection.close()
            yield orders.recv(1)
    with new(socket.SOCK_DGRAM, True) as udp:
        with subject.order_peer(f"datagrams {udp.getsockname()[1]} text") as orders:
            yield orders.recv(1)
            data, _, _, sender = udp.recvmsg(100)
            yield data, sender[0] == peer
    for is_bound in False, True:
        with new(socket.SOCK_STREAM, is_bound) as connection:
            yield code(connection.connect, (peer, CONTROL))
            connection.sendall(b"echo\ntext")
            yield connection.getpeername()[:2] == (peer, CONTROL), connection.recv(100)
            yield connection.getsockname()[0] == own
        with new(socket.SOCK_DGRAM, is_bound) as udp:
            yield code(udp.sendto, b"text", (peer, CONTROL))
            data, sender = udp.recvfrom(100)
            yield data, sender[:2] == (peer, CONTROL), udp.getsockname()[0] == (own if is_bound else "::")
            yield code(udp.connect, (peer, CONTROL))
            yield udp.getpeername()[:2] == (peer, CONTROL), udp.getsockname()[0] == own
            yield code(udp.send, b"more"), udp.recv(100)
    for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
        with new(kind, False, 1) as one:
            yield code(one.bind, (own, 0)), code(one.connect, (peer, CONTROL))
        with new(kind, True) as one:
            yield code(one.connect, ("fd00:9::1", CONTROL))
    with new(socket.SOCK_DGRAM, False, 1) as udp:
        yield code(udp.sendto, b"text", (peer, CONTROL))
    with new(socket.SOCK_DGRAM, True) as udp:
        yield code(udp.sendto, b"text", ("fd00:9::1", CONTROL))


def silent_datagrams(subject):
    """A socket whose port the kernel chose, which neither sends nor asks for its address."""
    any_address = "::" if subject.family == socket.AF_INET6 else "0.0.0.0"
    for address in any_address, subject.own:
        with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
            udp.bind((address, 0))
            udp.settimeout(LIMIT)
            inode = os.readlink(f"/proc/self/fd/{udp.fileno()}")[8:-1]
            suffix = "6" if subject.family == socket.AF_INET6 else ""
            with open(f"/proc/self/net/udp{suffix}") as table:
                line = next(line.split() for line in table if line.split()[9] == inode)
            port = int(line[1].rsplit(":", 1)[1], 16)
            with subject.order_peer(f"datagrams {port} one") as orders:
                yield orders.recv(1), udp.recv(100)


def port_zero(subject):
    """Connecting to port 0 chooses an address, and no peer."""
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        yield code(udp.connect, (subject.peer, 0)), code(udp.getpeername)
        yield udp.getsockname()[0] == subject.own, udp.getsockname()[1] > 0
        yield code(udp.connect, (subject.peer, CONTROL)), udp.getpeername()[1]
        yield code(udp.connect, (subject.peer, 0)), code(udp.getpeername)
        yield code(udp.sendto, b"text", (subject.peer, 0))
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as udp:
        is_v6 = subject.family == socket.AF_INET6
        yield code(udp.connect, (subject.peer if is_v6 else "::ffff:" + subject.peer, 0))
        yield udp.getsockname()[0] == (subject.own if is_v6 else "::ffff:" + subject.own)


def given_up_ports(subject):
    any_address = "::" if subject.family == socket.AF_INET6 else "0.0.0.0"
    for local in None, (any_address, 0), (any_address, 7012), (subject.own, 0), (subject.own, 7013):
        with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
            if local:
                udp.bind(local)
            udp.settimeout(LIMIT)
            udp.connect((subject.peer, CONTROL))
            yield udp.getsockname()[1] > 0
            yield disconnect(udp)[0], udp.getsockname()[:2], code(udp.getpeername)
            if local and local[1]:
                yield code(udp.sendto, b"text", (subject.peer, CONTROL)), udp.recv(100)
    # A refused connection gives up a port that it did not choose.
    for port in 0, 7014:
        with socket.socket(subject.family) as connection, socket.socket(subject.family) as other:
            connection.bind((subject.own, port))
            own = connection.getsockname()
            yield code(connection.connect, (subject.peer, 1))
            yield code(other.bind, own)
            yield code(connection.connect, (subject.peer, CONTROL))


def used_at_once(subject):
    """Several threads use a new socket at once, by several descriptors."""
    failures = []
    for _ in range(50):
        with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
            threads = []
            for number in range(4):
                other = udp.dup()
                call = other.connect if number % 2 else lambda to, by=other: by.sendto(b"text", to)
                use = lambda call=call: code(call, (subject.peer, CONTROL))
                threads.append(threading.Thread(target=lambda use=use: failures.append(use())))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT)
    yield set(failures)


def shut_while_sending(subject):
    for _ in range(3):
        with subject.order_peer("hold") as connection:
            fill(connection)
            connection.setblocking(True)
            waiting = in_thread(connection.sendall, bytes(1 << 24))
            yield code(connection.shutdown, socket.SHUT_WR)
            waiting[0].join(LIMIT)
            yield waiting[1]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def shut_after_end(subject):
    with subject.order_peer("count") as connection:
        connection.shutdown(socket.SHUT_WR)
        yield connection.recv(100), connection.recv(1)
        for how in socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR:
            yield code(connection.shutdown, how)


def queued_errors(subject):
    """ICMP errors with the datagrams that they quote (`IP_RECVERR`)."""
    is_v6 = subject.family == socket.AF_INET6
    option = (socket.IPPROTO_IPV6, 25) if is_v6 else (socket.IPPROTO_IP, 11)
    MSG_ERRQUEUE = 0x2000

    def take(udp, size=100):
        udp.setblocking(False)
        try:
            data, notes, flags, destination = udp.recvmsg(size, 200, MSG_ERRQUEUE)
        except OSError as error:
            return error_name(error.errno)
        finally:
            udp.settimeout(LIMIT)
        number, origin, kind, kind_code, info = struct.unpack_from("=IBBBxI", notes[0][2])
        # The reporter is a socket address.
        reporter = notes[0][2][24:40] if is_v6 else notes[0][2][20:24]
        named = socket.inet_ntop(subject.family, reporter)
        return (data, flags, destination[:2], notes[0][:2], len(notes[0][2]), error_name(number),
                (origin, kind, kind_code, info), named)

    for connects in True, False:
        for sets_early in True, False:
            with socket.socket(subject.family, socket.SOCK_DGRAM) as udp, select.epoll() as poll:
                udp.settimeout(LIMIT)
                if sets_early:
                    udp.setsockopt(*option, 1)
                    udp.sendto(b"moves", (subject.peer, CONTROL))
                else:
                    udp.sendto(b"moves", (subject.peer, CONTROL))
                    udp.setsockopt(*option, 1)
                yield udp.recv(100), udp.getsockopt(*option), take(udp)
                if connects:
                    udp.connect((subject.peer, 1))
                poll.register(udp, 0)
                for text in b"one", b"other":
                    yield code(udp.sendto, text, (subject.peer, 1))
                    yield [names(bits) for _, bits in poll.poll(LIMIT)]
                    yield take(udp, 4)
                    yield udp.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), take(udp)
                # The error of a call, and its report.
                yield code(udp.sendto, b"third", (subject.peer, 1))
                yield len(poll.poll(LIMIT)), code(udp.recv, 100), take(udp)[0], take(udp)
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp, select.epoll() as poll:
        # A report behind datagrams that are not read.
        udp.settimeout(LIMIT)
        udp.setsockopt(*option, 1)
        poll.register(udp, 0)
        for text in b"a", b"b":
            udp.sendto(text, (subject.peer, CONTROL))
        yield udp.recv(1, socket.MSG_PEEK)
        udp.sendto(b"none", (subject.peer, 1))
        yield [names(bits) for _, bits in poll.poll(LIMIT)], take(udp)[0], take(udp)
        yield udp.recv(100), udp.recv(100)
        udp.sendto(b"c", (subject.peer, CONTROL))
        yield udp.recv(100), take(udp)


def listening_again(subject):
    any_address = "::" if subject.family == socket.AF_INET6 else "0.0.0.0"
    for address in subject.own, any_address:
        for port in 0, 7015:
            with socket.socket(subject.family) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port))
                for _ in range(2):
                    state = lambda: listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                    yield state(), code(listener.listen), state()
                    port = listener.getsockname()[1]
                    with subject.order_peer(f"call {port} text") as orders:
                        with listener.accept()[0] as accepted:
                            yield accepted.recv(100, socket.MSG_WAITALL)
                        orders.recv(1)
                    if address == any_address:
                        loopback = "::1" if subject.family == socket.AF_INET6 else "127.0.0.1"
                        with socket.create_connection((loopback, port), LIMIT):
                            listener.accept()[0].close()
                    yield code(listener.shutdown, socket.SHUT_RD)


def send_buffers(subject):
    option = socket.SOL_SOCKET, socket.SO_SNDBUF
    with subject.order_peer("hold") as connection:
        size = connection.getsockopt(*option)
        connection.setblocking(False)
        yield 0 < connection.send(bytes(3 * size)) < 3 * size
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with subject.order_peer("hold") as connection:
        connection.setsockopt(*option, 20_000)
        yield connection.getsockopt(*option)
        fill(connection)
        connection.setblocking(True)
        # Attached there may be space again at once, so the thread need not wait.
        results = []
        sender = threading.Thread(target=lambda: results.append(code(connection.send, b"x")))
        sender.start()
        connection.setsockopt(*option, 100_000)
        sender.join(LIMIT)
        yield results, connection.getsockopt(*option)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def receive_times(subject):
    """The time of the last datagram (`SIOCGSTAMP`)."""
    SIOCGSTAMP, SIOCGSTAMPNS = 0x8906, 0x8907

    def time_of(udp, request, unit):
        raw = code(fcntl.ioctl, udp, request, bytes(16))
        if not isinstance(raw, bytes):
            return raw
        seconds, part = struct.unpack("=qq", raw)
        return seconds * 1_000_000_000 + part * unit

    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        udp.settimeout(LIMIT)
        udp.bind((subject.own, 0))
        yield time_of(udp, SIOCGSTAMP, 1000)
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        udp.settimeout(LIMIT)
        udp.bind((subject.own, 0))
        echo = lambda: (udp.sendto(b"text", (subject.peer, CONTROL)), udp.recv(100))
        yield echo()
        first = time_of(udp, SIOCGSTAMPNS, 1)
        # Without the question the time was not known.
        yield abs(time.time_ns() - first) < 10_000_000_000, time_of(udp, SIOCGSTAMPNS, 1) == first
        yield echo()
        second = time_of(udp, SIOCGSTAMPNS, 1)
        yield second > first, second - time_of(udp, SIOCGSTAMP, 1000) in range(1000)
        udp.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, 1)
        yield echo(), time_of(udp, SIOCGSTAMPNS, 1) == second


def long_datagrams(subject):
    limit = 65_507 if subject.family == socket.AF_INET else 65_527
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        udp.settimeout(LIMIT)
        for size in limit + 1, 65_536, 100_000:
            yield code(udp.sendto, bytes(size), (subject.peer, CONTROL))
        yield code(udp.sendto, bytes(limit), (subject.peer, CONTROL))
        udp.connect((subject.peer, CONTROL))
        for size in limit + 1, 65_536, 100_000:
            yield code(udp.send, bytes(size))
            yield udp.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        yield code(udp.sendmsg, [bytes(60_000), bytes(9_000)])
        yield code(udp.send, b"", 0)


def disconnect(connection):
    """Connects to an address of no family."""
    call = ctypes.CDLL(None, use_errno=True).connect
    raw = struct.pack("=H14x", socket.AF_UNSPEC)
    return call(connection.fileno(), raw, len(raw)), error_name(ctypes.get_errno())


def disconnected(subject):
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        udp.settimeout(LIMIT)
        udp.connect((subject.peer, CONTROL))
        ctypes.set_errno(0)
        yield disconnect(udp)
        yield code(udp.getpeername), code(udp.send, b"text")
        yield code(udp.sendto, b"text", (subject.peer, CONTROL)), udp.recv(100)
        yield code(udp.connect, (subject.peer, CONTROL)), code(udp.send, b"more"), udp.recv(100)
    with subject.order_peer("echo") as connection:
        yield disconnect(connection)
        yield code(connection.getpeername)
        yield code(connection.connect, (subject.peer, CONTROL))
        connection.sendall(b"echo\ntext")
        yield connection.recv(100)


def connecting_again(subject):
    with socket.socket(subject.family) as connection:
        yield code(connection.connect, (subject.peer, 1))
        yield code(connection.send, b"text", socket.MSG_NOSIGNAL), code(connection.recv, 100)
        yield code(connection.connect, (subject.peer, CONTROL))
        connection.sendall(b"echo\ntext")
        yield connection.recv(100)
    with socket.socket(subject.family) as connection:
        connection.bind((subject.own, 7010))
        yield code(connection.connect, (subject.peer, 1))
        yield code(connection.connect, (subject.peer, CONTROL))
        yield connection.getsockname()[1]


def sending_after_shutdown(subject):
    signals = []
    signal.signal(signal.SIGPIPE, lambda *_: signals.append("SIGPIPE"))
    with subject.order_peer("hold") as connection:
        connection.shutdown(socket.SHUT_WR)
        yield code(connection.send, b"text"), code(connection.send, b"text", socket.MSG_NOSIGNAL)
        yield code(connection.sendmsg, [b"text"]), code(os.write, connection.fileno(), b"text")
        yield signals
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def own_device(subject):
    """Sockets on one device by name."""
    device = next(name for _, name in socket.if_nameindex() if name != "lo")
    for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
        with socket.socket(subject.family, kind) as one:
            option = socket.SOL_SOCKET, socket.SO_BINDTODEVICE
            yield code(one.setsockopt, *option, b"no such device")
            yield code(one.setsockopt, *option, device.encode())
            yield one.getsockopt(*option, 100).rstrip(b"\0") == device.encode()
            yield code(one.connect, (subject.peer, CONTROL))
            one.sendall(b"echo\ntext")
            yield one.recv(100)
            yield code(one.setsockopt, *option, b"no such device")
            yield code(one.setsockopt, *option, device.encode())
            one.sendall(b"more")
            yield one.recv(100)


def zero_copying(subject):
    """Sends from the program's memory, and takes the notifications."""
    SO_ZEROCOPY, MSG_ZEROCOPY, MSG_ERRQUEUE = 60, 0x4000000, 0x2000
    option = socket.SOL_SOCKET, SO_ZEROCOPY

    def take(one):
        """Takes one notification, without the code for data that was copied."""
        try:
            data, notes, flags, sender = one.recvmsg(100, 200, MSG_ERRQUEUE)
        except OSError as error:
            return error_name(error.errno)
        number, origin, kind, _, first, last = struct.unpack_from("=IBBBxII", notes[0][2])
        return data, notes[0][:2], len(notes[0][2]), flags, sender, (number, origin, kind, first, last)

    def take_up_to(one, last):
        """Takes the notifications up to this number; returns the first, and the ends of all."""
        waiting = select.poll()
        waiting.register(one, 0)
        taken = []
        while not taken or taken[-1][-1][-1] != last:
            events = [names(bits) for _, bits in waiting.poll(LIMIT * 1000)]
            taken.append(take(one))
        first = taken[0]
        return events, first[:-1], first[-1][:-1], taken[-1][-1][-1]

    for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
        for sets_early in True, False:
            with socket.socket(subject.family, kind) as one, select.epoll() as poll:
                yield [code(one.setsockopt, *option, value) for value in (2, -1, 1, 0)]
                if sets_early:
                    yield code(one.setsockopt, *option, 1)
                one.connect((subject.peer, CONTROL))
                yield one.send(b"echo\ntext", 0 if sets_early else MSG_ZEROCOPY), take(one)
                yield one.recv(4, socket.MSG_WAITALL)
                if not sets_early:
                    yield code(one.setsockopt, *option, 1)
                poll.register(one, 0)
                yield one.getsockopt(*option), poll.poll(0)
                yield one.send(b"text", MSG_ZEROCOPY), take_up_to(one, 0)
                # A call that receives does not wait for the notification, nor end with it.
                yield one.send(b"more", MSG_ZEROCOPY), [names(bits) for _, bits in poll.poll(LIMIT)]
                yield len(one.recv(4, socket.MSG_WAITALL)), len(one.recv(4, socket.MSG_WAITALL))
                yield one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), take_up_to(one, 1)
                yield take(one), poll.poll(0)
                yield [one.send(b"text", MSG_ZEROCOPY) for _ in range(3)], take_up_to(one, 4)
                # What cannot be sent has no number. An empty datagram has one, unlike no bytes of a stream.
                if kind == socket.SOCK_DGRAM:
                    yield code(one.send, bytes(100_000), MSG_ZEROCOPY)
                yield one.send(b"", MSG_ZEROCOPY), one.sendmsg([b"te", b"xt"], [], MSG_ZEROCOPY)
                yield take_up_to(one, 6 if kind == socket.SOCK_DGRAM else 5)
                yield code(one.setsockopt, *option, 0), one.send(b"text", MSG_ZEROCOPY), take(one)
    # Accepted connections have what their listener has.
    for sets_early in True, False:
        with socket.socket(subject.family) as listener:
            listener.bind((subject.own, 0))
            if sets_early:
                listener.setsockopt(*option, 1)
            listener.listen(16)
            if not sets_early:
                listener.setsockopt(*option, 1)
            with subject.order_peer(f"call {listener.getsockname()[1]} text"), listener.accept()[0] as accepted:
                yield accepted.getsockopt(*option), accepted.send(b"text", MSG_ZEROCOPY)
                yield take_up_to(accepted, 0)


def connection_state(subject):
    """State, measurements and counts of a connection."""
    fin_wait_2, close_wait = 5, 8
    with subject.listener() as listener:
        port = listener.getsockname()[1]
        orders = subject.order_peer(f"call {port} text")
        accepted = listener.accept()[0]
        yield accepted.recv(100, socket.MSG_WAITALL)
        info = TcpInfo(accepted)
        yield info.state == close_wait, info.received - len("text") in (0, 1), info.acked
        accepted.close()
        orders.close()
    with subject.order_peer("echo") as connection:
        info = TcpInfo(connection)
        sent = len("echo\n")
        yield info.state, info.options & 7, info.shifts & 15 > 0, info.shifts >> 4 > 0
        for size in 1, 1_000, 100_000:
            connection.sendall(bytes(size))
            connection.recv(size, socket.MSG_WAITALL)
            sent += size
        # All of it has come back, so all of it is acknowledged, but for what is under way.
        while (info := TcpInfo(connection)).unacked:
            select.select([connection], [], [], 0)
        # The kernel counts the SYN.
        yield info.acked - sent in (0, 1), info.received == sent - len("echo\n")
        yield info.ca_state, info.retransmits, info.backoff, info.lost, info.unsent
        yield info.sent_segments > 20, info.received_segments > 20, info.total_retrans < 20
        yield 0 < info.min_rtt <= info.rtt + 1, 0 < info.rttvar, info.rto >= 200_000
        yield info.delivery_rate > 0, info.peer_window > 0
        connection.shutdown(socket.SHUT_WR)
        yield connection.recv(1), TcpInfo(connection).state in (6, 7)
    with subject.listener() as listener:
        # The peer's window closes, so that data stays unsent.
        with subject.order_peer(f"held {listener.getsockname()[1]}") as connection:
            with listener.accept()[0] as back:
                fill(connection)
                info = TcpInfo(connection)
                yield info.unsent > 0, info.acked > 0
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def path_sizes(subject):
    """Datagrams that are longer than a packet on the path."""
    is_v6 = subject.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, 23) if is_v6 else (socket.IPPROTO_IP, 10)
    limit = 1452 if is_v6 else 1472
    for sets_early in True, False:
        for connects in True, False:
            # IP_PMTUDISC_DONT, _WANT, _DO and _PROBE.
            for mode in 0, 1, 2, 3:
                with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
                    udp.settimeout(LIMIT)
                    if sets_early:
                        udp.setsockopt(level, option, mode)
                    if connects:
                        udp.connect((subject.peer, CONTROL))
                        send = udp.send
                    else:
                        send = lambda data: udp.sendto(data, (subject.peer, CONTROL))
                    yield code(send, b"first"), udp.recv(100)
                    if not sets_early:
                        udp.setsockopt(level, option, mode)
                    yield udp.getsockopt(level, option)
                    for size in limit, limit + 1, 3000:
                        yield code(send, bytes(size))
                    yield udp.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def broadcast_address(subject):
    if subject.family == socket.AF_INET6:
        return
    address = subject.own.rsplit(".", 1)[0] + ".255"
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        yield code(udp.bind, (address, 7011)), udp.getsockname() == (address, 7011)
        udp.settimeout(LIMIT)
        # Its own address is the source.
        yield code(udp.sendto, b"text", (subject.peer, CONTROL))
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        yield code(udp.bind, (address[:-3] + "254", 7011))


def control_data(subject):
    """Control messages of received datagrams."""
    any_address = "::" if subject.family == socket.AF_INET6 else "0.0.0.0"
    for address in any_address, subject.own:
        for requests_first in True, False:
            with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
                if requests_first:
                    request_marks(udp)
                udp.bind((address, 0))
                udp.settimeout(LIMIT)
                port = udp.getsockname()[1]
                request_marks(udp)
                for option, ticks in (SO_TIMESTAMP, 1_000_000), (SO_TIMESTAMPNS, 1_000_000_000):
                    udp.setsockopt(socket.SOL_SOCKET, option, 1)
                    before = time.time_ns()
                    with subject.order_peer(f"marked {port}") as orders:
                        data, notes, flags, _ = udp.recvmsg(100, 500)
                        yield data, flags, [(level, kind) for level, kind, _ in notes]
                        yield [raw for _, _, raw in notes[1:]]
                        seconds, part = struct.unpack("ll", notes[0][2])
                        received = seconds * 1_000_000_000 + part * (1_000_000_000 // ticks)
                        yield before - 1000 <= received <= time.time_ns()


def marked_datagrams(subject):
    """Hop limit and traffic class that change after the socket has sent."""
    with subject.order_peer("marks 3") as orders, socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        port = int(orders.recv(100))
        for hop_limit, traffic_class in (64, 0), (33, 0x20), (99, 0xB8):
            mark(udp, hop_limit, traffic_class)
            udp.sendto(b"text", (subject.peer, port))
            yield orders.recv(100)
    is_v6 = subject.family == socket.AF_INET6
    level, hops, kind = (socket.IPPROTO_IPV6, 52, 67) if is_v6 else (socket.IPPROTO_IP, 2, 1)
    number = lambda value: struct.pack("=i", value)
    with subject.order_peer("marks 4") as orders, socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        # For one datagram, as control messages.
        peer = (subject.peer, int(orders.recv(100)))
        mark(udp, 99, 0xB8)
        for notes in (
            [(level, hops, number(7))],
            [(level, kind, number(0x20)), (level, hops, number(255))],
            [(level, kind, number(0))],
            [],
        ):
            yield udp.sendmsg([b"text"], notes, 0, peer), orders.recv(100)
        for note in (hops, number(256)), (hops, number(-2)), (hops, b"x"), (kind, number(256)), (hops, b""):
            yield code(udp.sendmsg, [b"text"], [(level, *note)], 0, peer)


def segmented_datagrams(subject):
    """Several datagrams of one size by one call (`UDP_SEGMENT`)."""
    UDP, UDP_SEGMENT = socket.IPPROTO_UDP, 103
    size = lambda value: [(UDP, UDP_SEGMENT, struct.pack("=H", value))]
    with subject.order_peer("sizes") as orders, socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        peer = subject.peer, int(orders.recv(100))
        limit = 65_507 if subject.family == socket.AF_INET else 65_527
        headers = limit - 65_535 - (40 if subject.family == socket.AF_INET6 else 0)
        for connects in False, True:
            to = () if connects else (peer,)
            if connects:
                udp.connect(peer)

            def send(data, notes):
                sent = code(udp.sendmsg, data, notes, 0, *to)
                udp.sendto(b"", peer)
                return sent, orders.recv(10_000)

            yield send([b"aaaaa" b"bbbbb" b"cc"], size(5))
            yield send([b"aaa", b"aabbb", b"bb"], size(5))
            yield send([b"aaaa"], size(5)), send([b"aaaaa"], size(5)), send([b"aaaaa"], size(0))
            yield send([bytes(128)], size(1)), send([bytes(129)], size(1))
            yield send([bytes(3000)], size(1500 + headers)), send([bytes(3000)], size(1501 + headers))
            yield send([bytes(100)], size(1501 + headers)), send([bytes(limit)], size(1400))[0]
            yield send([bytes(limit + 1)], size(1400))[0], send([bytes(300)], size(100))
            for note in (UDP_SEGMENT, b"x"), (UDP_SEGMENT, struct.pack("=i", 5)), (104, struct.pack("=i", 1)):
                yield send([b"aaaaabb"], [(UDP, *note)])
            # For all calls, and for one call of them.
            yield code(udp.setsockopt, UDP, UDP_SEGMENT, 2), udp.getsockopt(UDP, UDP_SEGMENT)
            yield send([b"aabbc"], []), send([b"aaabb"], size(3)), send([b"aaaaa"], size(0))
            yield code(udp.sendto, b"aab", peer), code(udp.setsockopt, UDP, UDP_SEGMENT, 65_536)
            udp.setsockopt(UDP, UDP_SEGMENT, 0)
            yield send([b"aaaaa"], [])
    with subject.order_peer("sizes") as orders, socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        # Set before the socket moves.
        udp.setsockopt(UDP, UDP_SEGMENT, 2)
        peer = subject.peer, int(orders.recv(100))
        yield udp.sendto(b"aabbc", peer), udp.sendto(b"", peer), orders.recv(100)


def bounded_queue(subject):
    """What a socket with a small buffer keeps of many datagrams."""
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        udp.bind((subject.own, 0))
        for size in 10_000, 40_000:
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            port = udp.getsockname()[1]
            with subject.order_peer(f"many {port} 500") as orders:
                yield orders.recv(1)
                udp.setblocking(False)
                count = 0
                while code(udp.recv, 1000) != "EAGAIN":
                    count += 1
                yield 2 < count < size // 450
    with socket.socket(subject.family, socket.SOCK_DGRAM) as udp:
        udp.settimeout(LIMIT)
        udp.bind((subject.own, 0))
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        # An empty queue takes any datagram.
        for size in 1400, 1, 1300:
            udp.sendto(bytes(size), (subject.peer, CONTROL))
            yield len(udp.recv(2000))


def splicing(subject):
    splice = ctypes.CDLL(None, use_errno=True).splice
    nonblocking = 2

    def move(source, target, size, flags=0):
        result = splice(source, None, target, None, ctypes.c_size_t(size), flags)
        return result if result >= 0 else error_name(ctypes.get_errno())

    reader, writer = os.pipe()
    with subject.order_peer("pieces abcdef gh") as connection:
        socket_fd = connection.fileno()
        connection.setblocking(False)
        yield move(socket_fd, writer, 100)
        connection.setblocking(True)
        connection.sendall(b"1")
        connection.recv(6, socket.MSG_PEEK | socket.MSG_WAITALL)
        yield move(socket_fd, writer, 4), os.read(reader, 100)
        yield move(socket_fd, writer, 100), os.read(reader, 100)
        yield move(reader, socket_fd, 100, nonblocking)
        os.write(writer, b"2 more")
        yield move(reader, socket_fd, 1), os.read(reader, 100)
        yield connection.recv(2, socket.MSG_WAITALL)
        os.write(writer, b".")
        yield move(reader, socket_fd, 100)
        yield move(socket_fd, writer, 100)
        yield move(socket_fd, socket_fd, 1)
        offset = ctypes.byref(ctypes.c_longlong(0))
        yield splice(socket_fd, offset, writer, None, ctypes.c_size_t(1), 0), error_name(ctypes.get_errno())
    # Through a pipe that is smaller than the data.
    size = 1_000_000
    with subject.order_peer(f"give {size}") as connection:
        got = 0
        while got < size:
            moved = move(connection.fileno(), writer, size)
            got += len(os.read(reader, moved))
        yield got
    with subject.order_peer("count") as connection:
        sent = 0
        while sent < size:
            os.write(writer, bytes(40_000))
            left = 40_000
            while left:
                left -= move(reader, connection.fileno(), left)
            sent += 40_000
        connection.shutdown(socket.SHUT_WR)
        yield connection.recv(100)
    os.close(reader)
    os.close(writer)


def left_bytes(subject):
    TCP_INQ = 36
    with subject.order_peer("pieces abcdef") as connection:
        connection.setsockopt(socket.IPPROTO_TCP, TCP_INQ, 1)
        yield connection.getsockopt(socket.IPPROTO_TCP, TCP_INQ)
        connection.sendall(b"1")
        connection.recv(6, socket.MSG_PEEK | socket.MSG_WAITALL)
        for size in 2, 3, 1:
            data, notes, flags, _ = connection.recvmsg(size, 100)
            yield data, notes, flags
        connection.sendall(b"2")
        connection.recv(1, socket.MSG_PEEK)
        yield connection.recvmsg(1, 100)[:3]


def subject(own, peer, *chosen):
    own_side = Subject(own, peer)
    for part in [
        blocking, whole_and_peeked, vectors, nonblocking_connect, refused, reset,
        reset_with_unsent_data, reset_after_end, reset_in_close_wait, closed_with_unread_data, lingering, level_triggered, edge_triggered, one_shot, duplicate_members, ends, nested_and_mixed, accepting,
        deferred, stopped_listener, duplicates, descriptors, files, corked, corked_and_waiting, full, corked_and_full, options, interrupted, datagrams,
        bound_datagrams, datagrams_to_any_port, datagrams_to_another_family, shared_datagrams, over_loopback, children, threads,
        shut_listener, shut_datagrams, shut_connecting, shut_reading, read_end_alone, exclusive_members, discarding, early_duplicates,
        mapped_addresses, silent_datagrams, long_datagrams, disconnected, connecting_again, port_zero, given_up_ports, used_at_once, shut_while_sending,
        shut_after_end, listening_again, queued_errors, send_buffers, receive_times,
        sending_after_shutdown, own_device, zero_copying, connection_state, path_sizes, broadcast_address, control_data, marked_datagrams, segmented_datagrams, bounded_queue, splicing, left_bytes,
    ]:
        if chosen and part.__name__ not in chosen:
            continue
        number = 0
        try:
            for number, result in enumerate(part(own_side)):
                print(f"{part.__name__} {number}: {result}", flush=True)
        except Exception as error:
            print(f"{part.__name__} after {number}: {error!r}", flush=True)


def overwrite(own, peer):
    """Puts a file on every descriptor beyond the program's own, and prints what still works."""
    with Subject(own, peer).order_peer("echo") as connection, open("/dev/null") as null:
        chosen = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > null.fileno()]
        for fd in chosen:
            os.dup2(null.fileno(), fd)
        device = os.fstat(null.fileno()).st_rdev
        connection.sendall(b".")
        same = all(os.fstat(fd).st_rdev == device for fd in chosen)
        print(len(chosen) > 1, same, connection.recv(1))


if __name__ == "__main__":
    modes = {"peer": peer, "subject": subject, "overwrite": overwrite}
    modes[sys.argv[1]](*sys.argv[2:])
