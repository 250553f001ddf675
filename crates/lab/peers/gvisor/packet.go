package main

import (
	"fmt"
	"net"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	// Maximum number of frames in one system call.
	batchFrames = 64
	// Bytes of a buffer: a frame of 1,500 bytes of payload, and some.
	bufferBytes = 2048
	// Bytes that the socket holds.
	socketBytes = 4 << 20
)

type message struct {
	header unix.Msghdr
	len    uint32
	_      uint32
}

// batch is the frames of one system call.
type batch struct {
	messages [batchFrames]message
	vectors  [batchFrames]unix.Iovec
}

func (b *batch) point(at int, buffer []byte) {
	b.vectors[at].Base = &buffer[0]
	b.vectors[at].SetLen(len(buffer))
	b.messages[at].header.Iov = &b.vectors[at]
	b.messages[at].header.SetIovlen(1)
}

// packetLink is a link endpoint on a packet socket. Frames are received and sent in batches, as
// Tidegate's own device does, and no call sleeps.
type packetLink struct {
	socket     int
	address    tcpip.LinkAddress
	mtu        uint32
	dispatcher stack.NetworkDispatcher
	received   batch
	views      [batchFrames]*buffer.View

	// The stack's goroutines send, too.
	sending     sync.Mutex
	staged      batch
	stagedBytes [batchFrames][bufferBytes]byte
	stagedCount int
}

func openLink(name string) (*packetLink, error) {
	device, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	kind := unix.SOCK_RAW | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	socket, err := unix.Socket(unix.AF_PACKET, kind, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot open a packet socket: %w", err)
	}
	for _, option := range [][3]int{
		{unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBytes},
		{unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, socketBytes},
		{unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1},
		{unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1},
	} {
		if err := unix.SetsockoptInt(socket, option[0], option[1], option[2]); err != nil {
			return nil, fmt.Errorf("cannot set an option of the packet socket: %w", err)
		}
	}
	// All protocols, in network byte order.
	bound := &unix.SockaddrLinklayer{Protocol: unix.ETH_P_ALL << 8, Ifindex: device.Index}
	if err := unix.Bind(socket, bound); err != nil {
		return nil, fmt.Errorf("cannot bind the packet socket: %w", err)
	}
	address := tcpip.LinkAddress(device.HardwareAddr)
	link := &packetLink{socket: socket, address: address, mtu: uint32(device.MTU)}
	for at := range link.views {
		link.renew(at)
		link.staged.point(at, link.stagedBytes[at][:])
	}
	return link, nil
}

// renew gives a place of the receive batch a buffer, in place of the one that the stack has taken.
func (l *packetLink) renew(at int) {
	l.views[at] = buffer.NewViewSize(bufferBytes)
	l.received.point(at, l.views[at].AsSlice())
}

// receive hands what has arrived to the stack, up to a batch.
func (l *packetLink) receive() {
	first := uintptr(unsafe.Pointer(&l.received.messages[0]))
	count, _, failed := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(l.socket), first, batchFrames,
		unix.MSG_DONTWAIT, 0, 0)
	if failed != 0 {
		return
	}
	for at := 0; at < int(count); at++ {
		view := l.views[at]
		view.CapLength(int(l.received.messages[at].len))
		l.renew(at)
		packet := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(view)})
		if link, ok := packet.LinkHeader().Consume(header.EthernetMinimumSize); ok {
			l.dispatcher.DeliverNetworkPacket(header.Ethernet(link).Type(), packet)
		}
		packet.DecRef()
	}
}

// WritePackets implements stack.LinkWriter.
func (l *packetLink) WritePackets(packets stack.PacketBufferList) (int, tcpip.Error) {
	l.sending.Lock()
	defer l.sending.Unlock()
	for _, packet := range packets.AsSlice() {
		frame, filled := &l.stagedBytes[l.stagedCount], 0
		for _, part := range packet.AsSlices() {
			filled += copy(frame[filled:], part)
		}
		l.staged.vectors[l.stagedCount].SetLen(filled)
		l.stagedCount++
		if l.stagedCount == batchFrames {
			l.flushLocked()
		}
	}
	return packets.Len(), nil
}

// flush sends the batch.
func (l *packetLink) flush() {
	l.sending.Lock()
	l.flushLocked()
	l.sending.Unlock()
}

// flushLocked sends the batch. A frame that the kernel does not take is lost, as on a wire.
func (l *packetLink) flushLocked() {
	for sent := 0; sent < l.stagedCount; {
		first := uintptr(unsafe.Pointer(&l.staged.messages[sent]))
		count, _, failed := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(l.socket), first,
			uintptr(l.stagedCount-sent), unix.MSG_DONTWAIT, 0, 0)
		if failed != 0 || count == 0 {
			count = 1
		}
		sent += int(count)
	}
	l.stagedCount = 0
}

// AddHeader implements stack.NetworkLinkEndpoint.
func (l *packetLink) AddHeader(packet *stack.PacketBuffer) {
	link := header.Ethernet(packet.LinkHeader().Push(header.EthernetMinimumSize))
	link.Encode(&header.EthernetFields{
		SrcAddr: l.address,
		DstAddr: packet.EgressRoute.RemoteLinkAddress,
		Type:    packet.NetworkProtocolNumber,
	})
}

// ParseHeader implements stack.NetworkLinkEndpoint.
func (*packetLink) ParseHeader(packet *stack.PacketBuffer) bool {
	_, ok := packet.LinkHeader().Consume(header.EthernetMinimumSize)
	return ok
}

// MTU implements stack.NetworkLinkEndpoint.
func (l *packetLink) MTU() uint32 { return l.mtu }

// SetMTU implements stack.NetworkLinkEndpoint.
func (l *packetLink) SetMTU(mtu uint32) { l.mtu = mtu }

// MaxHeaderLength implements stack.NetworkLinkEndpoint.
func (*packetLink) MaxHeaderLength() uint16 { return header.EthernetMinimumSize }

// LinkAddress implements stack.NetworkLinkEndpoint.
func (l *packetLink) LinkAddress() tcpip.LinkAddress { return l.address }

// SetLinkAddress implements stack.NetworkLinkEndpoint.
func (l *packetLink) SetLinkAddress(address tcpip.LinkAddress) { l.address = address }

// Capabilities implements stack.NetworkLinkEndpoint.
func (*packetLink) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityResolutionRequired
}

// Attach implements stack.NetworkLinkEndpoint.
func (l *packetLink) Attach(dispatcher stack.NetworkDispatcher) { l.dispatcher = dispatcher }

// IsAttached implements stack.NetworkLinkEndpoint.
func (l *packetLink) IsAttached() bool { return l.dispatcher != nil }

// Wait implements stack.NetworkLinkEndpoint.
func (*packetLink) Wait() {}

// ARPHardwareType implements stack.NetworkLinkEndpoint.
func (*packetLink) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }

// Close implements stack.NetworkLinkEndpoint.
func (*packetLink) Close() {}

// SetOnCloseAction implements stack.NetworkLinkEndpoint.
func (*packetLink) SetOnCloseAction(func()) {}
