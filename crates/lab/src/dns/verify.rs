//! Whether a server gives the answers that another gives.

use serde::Serialize;
use tidegate_apps::dns::compare;

use super::bench::Bench;
use super::servers::Server;
use crate::error::LabError;
use crate::load::{LoadConfig, QuerySet, load_dns};

/// Slow enough that no server loses a question.
const RATE_PPS: f64 = 30_000.0;
/// Rounds of asking again for what was lost on the way.
const ROUNDS: usize = 5;

/// The answer to each question, if there was one.
pub type Answers = Vec<Option<Box<[u8]>>>;

/// Asks every question of the bench and keeps the answers, ids set to 0.
///
/// # Errors
/// When the load cannot be sent.
pub fn collect(bench: &Bench, server: &Server) -> Result<Answers, LabError> {
    let queries = &bench.queries;
    let mut answers: Answers = vec![None; queries.len()];
    for _ in 0..ROUNDS {
        let missing: Vec<usize> = (0..queries.len()).filter(|at| answers[*at].is_none()).collect();
        if missing.is_empty() {
            break;
        }
        let again = queries.select(&missing);
        ask(bench, server, &again, |index, answer| {
            let mut answer: Box<[u8]> = answer.into();
            answer[..2].fill(0);
            answers[missing[index]] = Some(answer);
        })?;
    }
    Ok(answers)
}

fn ask(
    bench: &Bench,
    server: &Server,
    queries: &QuerySet,
    mut keep: impl FnMut(usize, &[u8]) + Send,
) -> Result<(), LabError> {
    let config = LoadConfig {
        rate_pps: Some(RATE_PPS),
        requests: Some(queries.len() as u64),
        seconds: 60.0,
        drain_seconds: 1.0,
        ..bench.load_config(server)
    };
    bench
        .pair
        .a
        .namespace
        .enter(|| load_dns(&config, queries, Some(Box::new(&mut keep)), &mut |_| {}))?
        .map(drop)
}

/// How two servers' answers compare.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    /// Questions that both answered.
    pub compared: usize,
    /// Questions that were not answered by one of them, in spite of asking
    /// again.
    pub unanswered: usize,
    /// Answers that a resolver would find different.
    pub different: usize,
    /// The first of them, in words.
    pub examples: Vec<String>,
}

impl Comparison {
    /// Everything that is not as it should be.
    pub fn wrong(&self) -> usize {
        self.unanswered + self.different
    }
}

/// Compares answers with those of a reference, question by question.
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
    fn missing_and_different_answers_are_wrong() {
        let expected = vec![answer(1), answer(2), answer(3), None];
        let got = vec![answer(1), answer(9), None, answer(4)];
        let comparison = compare_all(&expected, &got);
        assert_eq!((comparison.compared, comparison.different, comparison.unanswered), (2, 1, 2));
        assert_eq!(comparison.wrong(), 3);
        assert!(comparison.examples[0].starts_with("question 1: answer"), "{comparison:?}");
    }
}
