//! Zone files to entries: a record or a directive each, over as many lines as
//! its parentheses span (RFC 1035 section 5.1).
//!
//! The scanner of `domain` reads one entry at a time, so that every record and
//! every error has a place in the file.

use std::borrow::Cow;

/// One record or directive.
pub(super) struct Entry<'a> {
    /// From the start of its first line to the end of its last.
    text: &'a [u8],
    /// Where its tokens begin and end in `text`; at least one.
    tokens: Vec<(usize, usize)>,
    /// The line on which its text begins, from 1.
    first_line: usize,
}

/// Why an entry has no end.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unfinished {
    /// Where the quotation mark or parenthesis is that opens it.
    pub line: usize,
    pub column: usize,
    pub expected: &'static str,
}

/// The entries of a zone file.
pub(super) struct Entries<'a> {
    rest: &'a [u8],
    line: usize,
    /// Handed from entry to entry, so that tokens need no new memory.
    tokens: Vec<(usize, usize)>,
}

impl<'a> Entries<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Entries { rest: text, line: 1, tokens: Vec::new() }
    }

    /// The next entry that is not empty; `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<Entry<'a>>, Unfinished> {
        while !self.rest.is_empty() {
            let mut tokens = std::mem::take(&mut self.tokens);
            tokens.clear();
            let first_line = self.line;
            let len = split(self.rest, &mut tokens).map_err(|(at, expected)| {
                let (line, column) = place_in(self.rest, at);
                Unfinished { line: line + first_line - 1, column, expected }
            })?;
            let (text, rest) = self.rest.split_at(len);
            self.rest = rest;
            self.line += text.iter().filter(|&&byte| byte == b'\n').count();
            if !tokens.is_empty() {
                return Ok(Some(Entry { text, tokens, first_line }));
            }
            self.tokens = tokens;
        }
        Ok(None)
    }

    /// Takes back the memory of an entry.
    pub(super) fn recycle(&mut self, entry: Entry<'a>) {
        self.tokens = entry.tokens;
    }
}

/// Finds the end of the first entry and its tokens. Fails with the place of
/// what is never closed.
fn split(text: &[u8], tokens: &mut Vec<(usize, usize)>) -> Result<usize, (usize, &'static str)> {
    let mut at = 0;
    let mut open = None;
    let mut depth = 0_usize;
    while let Some(&byte) = text.get(at) {
        let start = at;
        at += 1;
        match byte {
            b'\n' if depth == 0 => return Ok(at),
            b' ' | b'\t' | b'\r' | b'\n' => {}
            b'(' => {
                open = open.or(Some(start));
                depth += 1;
            }
            b')' => {
                depth = depth.saturating_sub(1);
                open = open.filter(|_| depth > 0);
            }
            b';' => at += text[at..].iter().take_while(|&&byte| byte != b'\n').count(),
            b'"' => {
                at = end_of_quoted(text, at).ok_or((start, "a closing quotation mark"))?;
                tokens.push((start, at));
            }
            _ => {
                at = end_of_plain(text, start);
                tokens.push((start, at));
            }
        }
    }
    match open {
        Some(place) => Err((place, "a closing parenthesis")),
        None => Ok(at),
    }
}

/// The end of a quoted token whose content begins at `at`.
fn end_of_quoted(text: &[u8], at: usize) -> Option<usize> {
    let mut at = at;
    loop {
        match text.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

fn end_of_plain(text: &[u8], start: usize) -> usize {
    let mut at = start;
    while let Some(&byte) = text.get(at) {
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' | b'(' | b')' | b';' | b'"' => break,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    at.min(text.len())
}

/// Line and column, from 1, of a place in a text.
fn place_in(text: &[u8], at: usize) -> (usize, usize) {
    let before = &text[..at.min(text.len())];
    let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
    let start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |place| place + 1);
    (line, before.len() - start + 1)
}

impl Entry<'_> {
    /// The text of a token; empty when there are not so many.
    pub(super) fn token(&self, index: usize) -> &[u8] {
        self.tokens.get(index).map_or(&[], |&(start, end)| &self.text[start..end])
    }

    /// The line and column of a token, from 1.
    pub(super) fn place(&self, index: usize) -> (usize, usize) {
        let at = self.tokens.get(index).map_or(self.text.len(), |&(start, _)| start);
        let (line, column) = place_in(self.text, at);
        (line + self.first_line - 1, column)
    }

    /// The token that a scanner means which stopped at this line and column of
    /// [`Entry::plain`]: the one that it is in, or has just read.
    pub(super) fn token_before(plain: &[u8], line: usize, column: usize) -> usize {
        let mut tokens = Vec::new();
        let _ = split(plain, &mut tokens);
        let line_start = match line.checked_sub(2) {
            None => 0,
            Some(skipped) => plain
                .iter()
                .enumerate()
                .filter(|&(_, &byte)| byte == b'\n')
                .nth(skipped)
                .map_or(plain.len(), |(at, _)| at + 1),
        };
        let at = line_start + column.saturating_sub(1);
        tokens.iter().take_while(|&&(start, _)| start < at).count().saturating_sub(1)
    }

    /// The text of the entry as the scanner wants it: TTLs with units, which
    /// other servers allow (`1h30m`), in seconds; a space behind a quoted token
    /// that the next one follows at once, where the scanner may want a byte to
    /// write to; and a line feed at the end.
    pub(super) fn plain(&self) -> Cow<'_, [u8]> {
        let times = self.times();
        let has_end = self.text.ends_with(b"\n");
        if times.is_empty() && has_end && !self.touches() {
            return Cow::Borrowed(self.text);
        }
        let mut plain = Vec::with_capacity(self.text.len() + 16);
        let mut copied = 0;
        let mut times = times.into_iter().peekable();
        for (index, &(start, end)) in self.tokens.iter().enumerate() {
            plain.extend_from_slice(&self.text[copied..start]);
            if index > 0 && self.touches_before(index) {
                plain.push(b' ');
            }
            match times.next_if(|&(at, _)| at == index) {
                Some((_, seconds)) => plain.extend_from_slice(seconds.to_string().as_bytes()),
                None => plain.extend_from_slice(&self.text[start..end]),
            }
            copied = end;
        }
        plain.extend_from_slice(&self.text[copied..]);
        if !has_end {
            plain.push(b'\n');
        }
        Cow::Owned(plain)
    }

    /// Whether any token begins right behind a quoted one.
    fn touches(&self) -> bool {
        (1..self.tokens.len()).any(|index| self.touches_before(index))
    }

    /// Whether a token begins right behind a quoted one.
    fn touches_before(&self, index: usize) -> bool {
        let ((before, end), (start, _)) = (self.tokens[index - 1], self.tokens[index]);
        end == start && self.text[before] == b'"'
    }

    /// The tokens that are times with units, in seconds.
    fn times(&self) -> Vec<(usize, u32)> {
        let mut times = Vec::new();
        let mut note = |index: usize| {
            let seconds = seconds(self.token(index));
            times.extend(seconds.map(|seconds| (index, seconds)));
            seconds.is_some()
        };
        if self.token(0).eq_ignore_ascii_case(b"$TTL") {
            note(1);
            return times;
        }
        // [owner] [TTL] [class] type, or [owner] [class] [TTL] type.
        let has_owner = self.tokens.first().is_some_and(|&(start, _)| start == 0);
        let mut index = usize::from(has_owner);
        for _ in 0..2 {
            let token = self.token(index);
            let is_number = token.first().is_some_and(u8::is_ascii_digit);
            if note(index) || is_number || token.eq_ignore_ascii_case(b"IN") {
                index += 1;
            }
        }
        if self.token(index).eq_ignore_ascii_case(b"SOA") {
            // Behind the two names and the serial number.
            (index + 4..index + 8).for_each(|index| {
                note(index);
            });
        }
        times
    }
}

/// The seconds of a time with units, like `2d12h`.
fn seconds(token: &[u8]) -> Option<u32> {
    if !token.first()?.is_ascii_digit() || token.last()?.is_ascii_digit() {
        return None;
    }
    let (mut total, mut number) = (0_u32, None);
    for byte in token {
        if byte.is_ascii_digit() {
            let digit = u32::from(byte - b'0');
            number = Some(number.unwrap_or(0_u32).checked_mul(10)?.checked_add(digit)?);
            continue;
        }
        let unit = match byte.to_ascii_lowercase() {
            b's' => 1,
            b'm' => 60,
            b'h' => 3600,
            b'd' => 86_400,
            b'w' => 604_800,
            _ => return None,
        };
        total = total.checked_add(number.take()?.checked_mul(unit)?)?;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(text: &str) -> (Vec<String>, String) {
        let mut entries = Entries::new(text.as_bytes());
        let entry = entries.next().unwrap().unwrap();
        let tokens = (0..entry.tokens.len())
            .map(|index| String::from_utf8(entry.token(index).to_vec()).unwrap())
            .collect();
        (tokens, String::from_utf8(entry.plain().into_owned()).unwrap())
    }

    #[test]
    fn tokens_end_where_rfc_1035_says() {
        let (tokens, plain) = only("a\\ b 60 TXT (\"x ; \\\" y\"; comment\n z)\t;end\nnext");
        assert_eq!(tokens, ["a\\ b", "60", "TXT", "\"x ; \\\" y\"", "z"]);
        assert!(plain.ends_with(";end\n"));
    }

    #[test]
    fn places_are_counted_over_all_lines() {
        let mut entries = Entries::new(b"\n; c\na A (\n 1\n)\n\n b A 2\n");
        let first = entries.next().unwrap().unwrap();
        assert_eq!((first.place(0), first.place(2)), ((3, 1), (4, 2)));
        entries.recycle(first);
        let second = entries.next().unwrap().unwrap();
        assert_eq!(second.place(0), (7, 2));
        assert!(entries.next().unwrap().is_none());
    }

    #[test]
    fn what_is_not_closed_is_told_where_it_opens() {
        let error = |text: &str| {
            let mut entries = Entries::new(text.as_bytes());
            while let Ok(Some(_)) = entries.next() {}
            entries.next().err().unwrap()
        };
        let expected = "a closing parenthesis";
        assert_eq!(error("a A 1\nb A (1\nc"), Unfinished { line: 2, column: 5, expected });
        let expected = "a closing quotation mark";
        assert_eq!(error("a TXT \"x\n\\\""), Unfinished { line: 1, column: 7, expected });
    }

    #[test]
    fn times_with_units_become_seconds() {
        assert_eq!(only("$TTL 1d").1, "$TTL 86400\n");
        assert_eq!(only("w 1h IN A 192.0.2.1").1, "w 3600 IN A 192.0.2.1\n");
        assert_eq!(only("w IN 1W2D3H4M5S A 192.0.2.1").1, "w IN 788645 A 192.0.2.1\n");
        assert_eq!(only(" 5m TXT 1h").1, " 300 TXT 1h\n");
        assert_eq!(only("1h 5m A 1h").1, "1h 300 A 1h\n");
        assert_eq!(only("@ SOA n h (7 2h 15m 2w 1h)").1, "@ SOA n h (7 7200 900 1209600 3600)\n");
        for token in ["1x", "h", "1h2", "12", "99999999999h", "4294967295w", "1hm"] {
            assert_eq!(seconds(token.as_bytes()), None, "{token}");
        }
    }
}
