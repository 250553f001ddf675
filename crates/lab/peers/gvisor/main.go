// Echo, sink and source server on gVisor's netstack, which never sleeps: a peer of
// `tidegate-lab peers`.
//
// --iface NAME --address ADDRESS/BITS --port NUMBER --role echo|sink|source --connections COUNT
//
// One goroutine receives and serves; the stack's own goroutines run when it yields. The stack needs
// no number of connections.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"sync"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	nic = 1
	// Bytes of a connection's buffers.
	streamBytes = 1 << 20
	// Bytes that one call reads or writes.
	callBytes = 64 << 10
	// Growth of the heap before a collection, in percent.
	collectPercent = 400
)

// socket is an endpoint of the stack with its place in the queue of those that are ready.
type socket struct {
	endpoint tcpip.Endpoint
	serve    func(*socket)
	isQueued bool
	isClosed bool
	// Bytes that are still to be echoed.
	left []byte
}

type server struct {
	role  string
	bytes []byte

	// The stack's goroutines queue sockets.
	queueing sync.Mutex
	ready    []*socket
	serving  []*socket
}

func (s *server) queue(one *socket) {
	s.queueing.Lock()
	if !one.isQueued {
		one.isQueued = true
		s.ready = append(s.ready, one)
	}
	s.queueing.Unlock()
}

func (s *server) serve() {
	s.queueing.Lock()
	s.ready, s.serving = s.serving[:0], s.ready
	for _, one := range s.serving {
		one.isQueued = false
	}
	s.queueing.Unlock()
	for _, one := range s.serving {
		if !one.isClosed {
			one.serve(one)
		}
	}
}

func (s *server) add(endpoint tcpip.Endpoint, queue *waiter.Queue, serve func(*socket)) *socket {
	one := &socket{endpoint: endpoint, serve: serve}
	mask := waiter.ReadableEvents | waiter.WritableEvents | waiter.EventHUp | waiter.EventErr
	entry := waiter.NewFunctionEntry(mask, func(waiter.EventMask) { s.queue(one) })
	queue.EventRegister(&entry)
	// What came before the entry was registered.
	s.queue(one)
	return one
}

func (one *socket) close() {
	one.isClosed = true
	one.endpoint.Close()
}

func (s *server) accept(listener *socket) {
	for {
		endpoint, queue, err := listener.endpoint.Accept(nil)
		if err != nil {
			return
		}
		endpoint.SocketOptions().SetDelayOption(false)
		serve := s.echo
		switch s.role {
		case "sink":
			serve = s.receive
		case "source":
			serve = s.send
		}
		s.add(endpoint, queue, serve)
	}
}

func isWouldBlock(err tcpip.Error) bool {
	_, is := err.(*tcpip.ErrWouldBlock)
	return is
}

func (s *server) echo(one *socket) {
	for {
		if len(one.left) > 0 {
			written, err := one.endpoint.Write(bytes.NewReader(one.left), tcpip.WriteOptions{})
			if err != nil && !isWouldBlock(err) {
				one.close()
				return
			}
			one.left = one.left[written:]
			if len(one.left) > 0 {
				return
			}
		}
		var space tcpip.SliceWriter = s.bytes
		result, err := one.endpoint.Read(&space, tcpip.ReadOptions{})
		if err != nil {
			if !isWouldBlock(err) {
				one.close()
			}
			return
		}
		written, err := one.endpoint.Write(bytes.NewReader(s.bytes[:result.Count]), tcpip.WriteOptions{})
		if err != nil && !isWouldBlock(err) {
			one.close()
			return
		}
		if int(written) < result.Count {
			one.left = bytes.Clone(s.bytes[written:result.Count])
			return
		}
	}
}

// discard counts and drops what is read.
type discard struct{}

func (discard) Write(data []byte) (int, error) { return len(data), nil }

func (s *server) receive(one *socket) {
	for {
		result, err := one.endpoint.Read(discard{}, tcpip.ReadOptions{})
		if err != nil {
			if !isWouldBlock(err) {
				one.close()
			}
			return
		}
		one.endpoint.ModerateRecvBuf(result.Count)
	}
}

func (s *server) send(one *socket) {
	for {
		_, err := one.endpoint.Write(bytes.NewReader(s.bytes), tcpip.WriteOptions{})
		if err != nil {
			if !isWouldBlock(err) {
				one.close()
			}
			return
		}
	}
}

func (s *server) echoDatagrams(one *socket) {
	for {
		var space tcpip.SliceWriter = s.bytes
		result, err := one.endpoint.Read(&space, tcpip.ReadOptions{NeedRemoteAddr: true})
		if err != nil {
			return
		}
		// A datagram that cannot be sent is lost.
		to := tcpip.WriteOptions{To: &result.RemoteAddr}
		_, _ = one.endpoint.Write(bytes.NewReader(s.bytes[:result.Count]), to)
	}
}

func openStack(link *packetLink, prefix netip.Prefix) (*stack.Stack, tcpip.NetworkProtocolNumber, error) {
	all := stack.New(stack.Options{
		NetworkProtocols: []stack.NetworkProtocolFactory{
			arp.NewProtocol, ipv4.NewProtocol, ipv6.NewProtocol,
		},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	acks := tcpip.TCPSACKEnabled(true)
	send := tcpip.TCPSendBufferSizeRangeOption{Min: 4096, Default: streamBytes, Max: 8 * streamBytes}
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: streamBytes, Max: 8 * streamBytes}
	for _, option := range []tcpip.SettableTransportProtocolOption{&acks, &send, &receive} {
		if err := all.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return nil, 0, fmt.Errorf("cannot set an option of TCP: %v", err)
		}
	}
	if err := all.CreateNIC(nic, link); err != nil {
		return nil, 0, fmt.Errorf("cannot add the interface: %v", err)
	}
	family := ipv4.ProtocolNumber
	if prefix.Addr().Is6() {
		family = ipv6.ProtocolNumber
	}
	address := tcpip.AddrFromSlice(prefix.Addr().AsSlice()).WithPrefix()
	address.PrefixLen = prefix.Bits()
	added := tcpip.ProtocolAddress{Protocol: family, AddressWithPrefix: address}
	if err := all.AddProtocolAddress(nic, added, stack.AddressProperties{}); err != nil {
		return nil, 0, fmt.Errorf("cannot add the address: %v", err)
	}
	all.SetRouteTable([]tcpip.Route{{Destination: address.Subnet(), NIC: nic}})
	return all, family, nil
}

func (s *server) open(all *stack.Stack, family tcpip.NetworkProtocolNumber, port uint16) error {
	at := tcpip.FullAddress{NIC: nic, Port: port}
	var queue waiter.Queue
	listener, err := all.NewEndpoint(tcp.ProtocolNumber, family, &queue)
	if err == nil {
		err = listener.Bind(at)
	}
	if err == nil {
		err = listener.Listen(1024)
	}
	if err != nil {
		return fmt.Errorf("cannot listen: %v", err)
	}
	s.add(listener, &queue, s.accept)
	if s.role != "echo" {
		return nil
	}
	var datagrams waiter.Queue
	endpoint, err := all.NewEndpoint(udp.ProtocolNumber, family, &datagrams)
	if err == nil {
		err = endpoint.Bind(at)
	}
	if err != nil {
		return fmt.Errorf("cannot bind the UDP port: %v", err)
	}
	endpoint.SocketOptions().SetReceiveBufferSize(streamBytes, true)
	s.add(endpoint, &datagrams, s.echoDatagrams)
	return nil
}

func run() error {
	name := flag.String("iface", "", "interface")
	address := flag.String("address", "", "address and prefix length")
	port := flag.Uint("port", 0, "TCP and UDP port")
	role := flag.String("role", "echo", "echo, sink or source")
	flag.Uint("connections", 0, "number of connections to come")
	flag.Parse()
	prefix, err := netip.ParsePrefix(*address)
	if err != nil {
		return err
	}
	if *role != "echo" && *role != "sink" && *role != "source" {
		return fmt.Errorf("--role is echo, sink or source, not %s", *role)
	}
	// The server has one core.
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(collectPercent)
	link, err := openLink(*name)
	if err != nil {
		return err
	}
	all, family, err := openStack(link, prefix)
	if err != nil {
		return err
	}
	s := &server{role: *role, bytes: make([]byte, callBytes)}
	if err := s.open(all, family, uint16(*port)); err != nil {
		return err
	}
	fmt.Println("ready")
	for {
		link.receive()
		runtime.Gosched()
		s.serve()
		link.flush()
	}
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
