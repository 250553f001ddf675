//! Exchanges: datagrams that a callback answers, in batches.

use std::io;

use tidegate_memory::Arena;
use tidegate_stack::{InPlaceRequest, Stack, UdpId, UdpRequest};

use super::socket::UdpSocket;
use crate::net::source::Pollable;
#[cfg(feature = "attach")]
use crate::types::datagram::DatagramMeta;
#[cfg(feature = "attach")]
use crate::types::exchange::ExchangeBuffers;
use crate::types::exchange::{Exchange, MAX_EXCHANGE_DATAGRAMS};
use crate::types::service_times::ServiceTimes;

impl UdpSocket {
    /// Answers datagrams in a batch: waits for at least one datagram, and passes each to
    /// `respond` with a buffer for the reply. `respond` returns the reply's length in bytes, or
    /// `None` to send nothing. Returns the number of datagrams taken, at most 64.
    ///
    /// On an embedded stack request and reply are in frames, and nothing is copied. On an
    /// attached stack each is copied once, between shared memory and a buffer of this process.
    ///
    /// A reply leaves from the address that the datagram was sent to. A reply is dropped when
    /// there is no transmit space; an embedded stack counts the drop.
    ///
    /// # Errors
    /// As [`UdpSocket::recv_from`].
    pub fn exchange(
        &self,
        respond: impl FnMut(UdpRequest<'_>, &mut [u8]) -> Option<usize>,
    ) -> io::Result<usize> {
        self.exchange_batch(Separate(respond))
    }

    /// Like [`UdpSocket::exchange`], but each reply is written over its datagram, for replies
    /// that resemble their requests: no second buffer is needed, and unchanged bytes need not be
    /// written.
    ///
    /// # Errors
    /// As [`UdpSocket::exchange`].
    pub fn exchange_in_place(
        &self,
        respond: impl FnMut(InPlaceRequest<'_>) -> Option<usize>,
    ) -> io::Result<usize> {
        self.exchange_batch(InPlace(respond))
    }

    /// Like [`UdpSocket::exchange`], and measures how long the datagrams took from their arrival
    /// until the device had the replies. Afterwards [`ServiceTimes::last`] has the times of this
    /// exchange. `times` belongs to this socket alone, and to all of its exchanges.
    ///
    /// The clock is read once for each burst that arrives and once for each exchange; while bursts are
    /// large, for one of eight.
    ///
    /// # Errors
    /// As [`UdpSocket::exchange`].
    pub fn exchange_timed(
        &self,
        times: &mut ServiceTimes,
        respond: impl FnMut(UdpRequest<'_>, &mut [u8]) -> Option<usize>,
    ) -> io::Result<usize> {
        self.exchange_batch(Timed::new(Separate(respond), times))
    }

    /// Like [`UdpSocket::exchange_in_place`], and measures as [`UdpSocket::exchange_timed`] does.
    ///
    /// # Errors
    /// As [`UdpSocket::exchange`].
    pub fn exchange_in_place_timed(
        &self,
        times: &mut ServiceTimes,
        respond: impl FnMut(InPlaceRequest<'_>) -> Option<usize>,
    ) -> io::Result<usize> {
        self.exchange_batch(Timed::new(InPlace(respond), times))
    }

    /// Waits for datagrams, answers a batch of them, and transmits the replies.
    fn exchange_batch(&self, mut exchange: impl Exchange) -> io::Result<usize> {
        self.net().udp_exchange(self.udp_id(), self.read_deadline(), &mut exchange)
    }
}

/// Callback that writes each reply to a buffer of its own.
struct Separate<F>(F);

/// Callback that writes each reply over its request.
struct InPlace<F>(F);

/// Exchange whose service times are measured.
struct Timed<'t, E> {
    exchange: E,
    times: &'t mut ServiceTimes,
}

impl<'t, E> Timed<'t, E> {
    fn new(exchange: E, times: &'t mut ServiceTimes) -> Self {
        times.clear_last();
        Self { exchange, times }
    }
}

impl<E: Exchange> Exchange for Timed<'_, E> {
    #[inline]
    fn answer_in_frames(
        &mut self,
        stack: &mut Stack,
        arena: &mut Arena,
        now_ns: u64,
        id: UdpId,
    ) -> usize {
        self.exchange.answer_in_frames(stack, arena, now_ns, id)
    }

    #[cfg(feature = "attach")]
    fn answer_copy<'b>(
        &mut self,
        buffers: &'b mut ExchangeBuffers,
        request: &DatagramMeta,
    ) -> Option<&'b [u8]> {
        self.exchange.answer_copy(buffers, request)
    }

    #[inline]
    fn times(&mut self) -> Option<&mut ServiceTimes> {
        Some(self.times)
    }
}

impl<F: FnMut(UdpRequest<'_>, &mut [u8]) -> Option<usize>> Exchange for Separate<F> {
    #[inline]
    fn answer_in_frames(
        &mut self,
        stack: &mut Stack,
        arena: &mut Arena,
        now_ns: u64,
        id: UdpId,
    ) -> usize {
        stack.udp_exchange(now_ns, arena, id, MAX_EXCHANGE_DATAGRAMS, &mut self.0)
    }

    #[cfg(feature = "attach")]
    fn answer_copy<'b>(
        &mut self,
        buffers: &'b mut ExchangeBuffers,
        request: &DatagramMeta,
    ) -> Option<&'b [u8]> {
        let ExchangeBuffers { request: payload, reply } = buffers;
        let bytes = &payload[..request.len];
        let len = (self.0)(UdpRequest { bytes, from: request.from, to: request.to }, reply)?;
        reply.get(..len)
    }
}

impl<F: FnMut(InPlaceRequest<'_>) -> Option<usize>> Exchange for InPlace<F> {
    #[inline]
    fn answer_in_frames(
        &mut self,
        stack: &mut Stack,
        arena: &mut Arena,
        now_ns: u64,
        id: UdpId,
    ) -> usize {
        stack.udp_exchange_in_place(now_ns, arena, id, MAX_EXCHANGE_DATAGRAMS, &mut self.0)
    }

    #[cfg(feature = "attach")]
    fn answer_copy<'b>(
        &mut self,
        buffers: &'b mut ExchangeBuffers,
        request: &DatagramMeta,
    ) -> Option<&'b [u8]> {
        let DatagramMeta { len, from, to, .. } = *request;
        let buffer = &mut *buffers.request;
        let len = (self.0)(InPlaceRequest { buffer, len, from, to })?;
        buffers.request.get(..len)
    }
}
