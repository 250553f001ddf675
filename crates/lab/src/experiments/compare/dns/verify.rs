//! Comparison of one server's answers with those of a reference server.

use serde::Serialize;
use tidegate_apps::dns::compare;
use tidegate_load::{LoadConfig, QuerySet, load_dns};

use crate::error::LabError;
use crate::testbed::dns::DnsTestbed;
use crate::testbed::dns::servers::Server;

/// Query rate per second, low enough that no server loses a query.
const RATE_PPS: f64 = 30_000.0;
/// Rounds of queries; each round repeats the queries that were lost in the round before.
const MAX_ROUNDS: usize = 5;

/// Reply to each query; `None` where there was none.
pub type Answers = Vec<Option<Box<[u8]>>>;

/// Sends every query of the testbed and returns the replies with their ids set to 0.
///
/// # Errors
/// When the load cannot be sent.
pub fn collect(testbed: &DnsTestbed, server: &Server) -> Result<Answers, LabError> {
    let queries = &testbed.queries;
    let mut answers: Answers = vec![None; queries.len()];
    for _ in 0..MAX_ROUNDS {
        let missing: Vec<usize> = (0..queries.len()).filter(|at| answers[*at].is_none()).collect();
        if missing.is_empty() {
            break;
        }
        let retry_queries = queries.select(&missing);
        send_queries(testbed, server, &retry_queries, |index, answer| {
            let mut answer: Box<[u8]> = answer.into();
            answer[..2].fill(0);
            answers[missing[index]] = Some(answer);
        })?;
    }
    Ok(answers)
}

fn send_queries(
    testbed: &DnsTestbed,
    server: &Server,
    queries: &QuerySet,
    mut keep: impl FnMut(usize, &[u8]) + Send,
) -> Result<(), LabError> {
    let config = LoadConfig {
        rate_pps: Some(RATE_PPS),
        requests: Some(queries.len() as u64),
        seconds: 60.0,
        drain_seconds: 1.0,
        ..testbed.load_config(server)
    };
    let client = &testbed.pair.a.namespace;
    client.enter(|| load_dns(&config, queries, Some(Box::new(&mut keep)), &mut |_| {}))??;
    Ok(())
}

/// Result of comparing two servers' answers.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    /// Queries that both servers answered.
    pub compared: usize,
    /// Queries that at least one server left unanswered, in spite of repeated queries.
    pub unanswered: usize,
    /// Answers that a resolver would treat as different.
    pub different: usize,
    /// Descriptions of the first differences, at most five.
    pub examples: Vec<String>,
}

impl Comparison {
    /// Number of unanswered queries and different answers.
    pub fn wrong_count(&self) -> usize {
        self.unanswered + self.different
    }
}

/// Compares answers with those of a reference, query by query.
pub fn compare_all(expected: &Answers, got: &Answers) -> Comparison {
    let mut comparison = Comparison::default();
    for (index, pair) in expected.iter().zip(got).enumerate() {
        let (Some(expected), Some(got)) = pair else {
            comparison.unanswered += 1;
            continue;
        };
        comparison.compared += 1;
        if let Err(difference) = compare(expected, got) {
            comparison.different += 1;
            if comparison.examples.len() < 5 {
                comparison.examples.push(format!("question {index}: {difference}"));
            }
        }
    }
    comparison
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(last_byte: u8) -> Option<Box<[u8]>> {
        let mut message = vec![0, 0, 0x84, 0, 0, 1, 0, 1, 0, 0, 0, 0];
        message.extend(b"\x01a\x00\x00\x01\x00\x01");
        message.extend(b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x0e\x10\x00\x04\xc0\x00\x02");
        message.push(last_byte);
        Some(message.into())
    }

    #[test]
    fn counts_missing_and_different_answers_as_wrong() {
        let expected = vec![answer(1), answer(2), answer(3), None];
        let got = vec![answer(1), answer(9), None, answer(4)];
        let comparison = compare_all(&expected, &got);
        assert_eq!((comparison.compared, comparison.different, comparison.unanswered), (2, 1, 2));
        assert_eq!(comparison.wrong_count(), 3);
        assert!(comparison.examples[0].starts_with("question 1: answer"), "{comparison:?}");
    }
}
