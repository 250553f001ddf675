//! Connections whose requests wait in the queue of admission.

use super::*;
use crate::http::HttpRequests;
use crate::requests::{RequestsConfig, SessionSecret};

fn admitting_server(text: &str) -> Server {
    let server = Server::new(HttpLimits::default());
    let config: RequestsConfig = toml::from_str(text).unwrap();
    let (policy, secret) = (config.compile().unwrap(), SessionSecret::new([1; 16]));
    server.queue.replace(Some(HttpRequests { policy, secret }));
    tokio::spawn(Arc::clone(&server.queue).run());
    server
}

#[tokio::test(start_paused = true)]
async fn pipelined_requests_are_admitted_and_answered_in_order() {
    let server = admitting_server("");
    let mut client = server.connect();
    let one = "GET /none HTTP/1.1\r\nHost: x\r\n\r\n";
    client.send(&[STATUS, one].concat().repeat(40)).await;
    for _ in 0..40 {
        for status in ["200", "404"] {
            assert!(client.response().await.starts_with(&format!("HTTP/1.1 {status}")));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn client_that_repeats_a_refused_request_waits() {
    let server = admitting_server("[[class]]\nname = 'all'\nceiling-rps = 1");
    for peer in ["192.0.2.1", "2001:db8::1"] {
        let mut client = server.connect_from(peer);
        let mut refused = Vec::new();
        while refused.len() < 3 {
            let began = Instant::now();
            client.send(STATUS).await;
            let response = client.response().await;
            if response.starts_with("HTTP/1.1 503") {
                assert!(response.contains("retry-after: 10"), "{response}");
                refused.push(began.elapsed());
            }
        }
        assert!(refused[0] < REFUSAL_DELAY, "{refused:?}");
        assert!(refused[1..].iter().all(|&time| time >= REFUSAL_DELAY), "{refused:?}");
    }
    assert_eq!(server.count(|counters| &counters.refused), 6);
}

#[tokio::test(start_paused = true)]
async fn client_that_does_not_read_holds_no_turn() {
    let server = admitting_server("");
    let mut slow = server.connect();
    slow.send(&"GET /large HTTP/1.1\r\nHost: x\r\n\r\n".repeat(40)).await;
    let mut client = server.connect();
    for _ in 0..10 {
        client.send(STATUS).await;
        assert!(client.response().await.starts_with("HTTP/1.1 200"));
    }
}
