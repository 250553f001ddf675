//! UDP closed loop of a client on kernel sockets that never sleeps.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::core;
use crate::error::LoadError;
use crate::kernel_link::{connected_socket, is_transient};
use crate::latency::{LatencyHistogram, LatencySummary};
use crate::sys::DatagramBatch;

/// Time without an answer after which all requests count as lost, and are sent again.
const LOSS_TIMEOUT: Duration = Duration::from_millis(100);
/// Longest time without any answer, on a machine so busy that the server does not run.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of the time stamp at the beginning of each payload.
const TIME_BYTES: usize = 8;

/// Configuration of a spinning closed loop.
#[derive(Clone, Copy, Debug)]
pub struct SpinningConfig {
    /// Address and port of the server.
    pub target: SocketAddr,
    /// Requests in flight.
    pub in_flight: usize,
    /// Bytes of a payload, at least 8.
    pub bytes: usize,
    /// Duration before the measurement, in seconds.
    pub warm_up_seconds: f64,
    /// Duration of the measurement, in seconds.
    pub seconds: f64,
    /// Core to run on.
    pub core: usize,
}

/// Result of a spinning closed loop.
#[derive(Clone, Copy, Debug)]
pub struct SpinningReport {
    /// Answers per second.
    pub answered_pps: f64,
    /// Time from the send call of a request to the receive call of its answer.
    pub latency: LatencySummary,
    /// Requests that were sent again because no answer came.
    pub resent: u64,
}

/// Keeps requests in flight to a UDP echo server, on one connected kernel socket, and polls the
/// socket without a pause.
///
/// # Errors
/// If the configuration is invalid, the socket fails, or no answer arrives.
pub fn load_udp_spinning(config: &SpinningConfig) -> Result<SpinningReport, LoadError> {
    let SpinningConfig { target, in_flight, bytes, warm_up_seconds, seconds, core } = *config;
    if in_flight == 0 || bytes < TIME_BYTES {
        let what = format!("requests in flight and bytes must be 1 and {TIME_BYTES} or more");
        return Err(LoadError::Config(what));
    }
    core::pin_thread(None, core)?;
    let failed = || LoadError::io(format!("UDP load on {target} failed"));
    let socket = connected_socket(target, None).map_err(failed())?;
    let mut spinning = Spinning {
        socket,
        tx_batch: DatagramBatch::new(in_flight, bytes),
        rx_batch: DatagramBatch::new(in_flight, bytes),
        began: Instant::now(),
        latency: LatencyHistogram::default(),
        resent: 0,
    };
    spinning.send(in_flight, bytes).map_err(failed())?;
    let mut began = Instant::now();
    for seconds in [warm_up_seconds, seconds] {
        spinning.latency.clear();
        began = Instant::now();
        spinning.run(in_flight, bytes, Duration::from_secs_f64(seconds)).map_err(failed())?;
        if spinning.latency.count() == 0 {
            return Err(LoadError::Config(format!("no response from {target}")));
        }
    }
    let answered = spinning.latency.count();
    Ok(SpinningReport {
        answered_pps: answered as f64 / began.elapsed().as_secs_f64(),
        latency: spinning.latency.summary(),
        resent: spinning.resent,
    })
}

struct Spinning {
    socket: UdpSocket,
    tx_batch: DatagramBatch,
    rx_batch: DatagramBatch,
    began: Instant,
    latency: LatencyHistogram,
    resent: u64,
}

impl Spinning {
    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn send(&mut self, count: usize, bytes: usize) -> io::Result<()> {
        let now_ns = self.now_ns();
        for index in 0..count {
            let slot = self.tx_batch.slot_mut(index);
            slot[..TIME_BYTES].copy_from_slice(&now_ns.to_le_bytes());
            self.tx_batch.set_len(index, bytes);
        }
        match self.tx_batch.send(self.socket.as_fd(), 0..count) {
            Err(error) if !is_transient(&error) => Err(error),
            // Requests that the kernel did not take are lost, and sent again.
            _ => Ok(()),
        }
    }

    /// Sends a request for each answer, for `duration`, or until the first answer after it.
    fn run(&mut self, in_flight: usize, bytes: usize, duration: Duration) -> io::Result<()> {
        let began = Instant::now();
        let mut last_answer = began;
        loop {
            let count = match self.rx_batch.receive(self.socket.as_fd()) {
                Ok(count) => count,
                Err(error) if is_transient(&error) => 0,
                Err(error) => return Err(error),
            };
            let now = Instant::now();
            let is_silent = self.latency.count() == 0 && now - began < duration + SILENCE_TIMEOUT;
            if now - began > duration && !is_silent {
                // As many requests stay in flight for the next run.
                return self.send(count, bytes);
            }
            if count > 0 {
                last_answer = now;
                self.record(count);
                self.send(count, bytes)?;
            } else if now - last_answer > LOSS_TIMEOUT {
                last_answer = now;
                self.resent += in_flight as u64;
                self.send(in_flight, bytes)?;
            }
        }
    }

    fn record(&mut self, count: usize) {
        let now_ns = self.now_ns();
        for index in 0..count {
            if let Some(sent) = self.rx_batch.get(index).first_chunk::<TIME_BYTES>() {
                self.latency.record(now_ns.saturating_sub(u64::from_le_bytes(*sent)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_requests_in_flight_and_measures_their_time() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let server = UdpSocket::bind(address).unwrap();
            let target = server.local_addr().unwrap();
            let timeout = Some(Duration::from_secs(10));
            server.set_read_timeout(timeout).unwrap();
            let echo = std::thread::spawn(move || {
                let (mut buffer, mut echoed) = ([0; 256], 0_u64);
                // The end of the load is the last datagram, of one byte.
                loop {
                    let (len, from) = server.recv_from(&mut buffer).unwrap();
                    if len == 1 {
                        return echoed;
                    }
                    echoed += 1;
                    server.send_to(&buffer[..len], from).unwrap();
                }
            });
            let config = SpinningConfig {
                target,
                in_flight: 4,
                bytes: 64,
                warm_up_seconds: 0.01,
                seconds: 0.05,
                core: 0,
            };
            let report = load_udp_spinning(&config).unwrap();
            UdpSocket::bind(address).unwrap().send_to(&[0], target).unwrap();
            let echoed = echo.join().unwrap();
            assert!(report.latency.count > 0 && report.latency.count <= echoed);
            assert!(report.latency.max_us < 10e6);
        }
    }

    #[test]
    fn silent_server_is_an_error() {
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let config = SpinningConfig {
            target: silent.local_addr().unwrap(),
            in_flight: 1,
            bytes: 64,
            warm_up_seconds: 0.0,
            seconds: 0.01,
            core: 0,
        };
        assert!(load_udp_spinning(&config).unwrap_err().to_string().contains("no response"));
        let short = SpinningConfig { bytes: 4, ..config };
        assert!(load_udp_spinning(&short).is_err());
    }
}
