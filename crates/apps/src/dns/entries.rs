//! Splits zone files into entries. An entry is one record or directive, over as many lines as its
//! parentheses span (RFC 1035 section 5.1).
//!
//! The scanner of the crate `domain` gets one entry at a time, so that every record and every
//! error has a location in the file.

use std::borrow::Cow;

use super::name;

/// Record or directive of a zone file.
pub(super) struct FileEntry<'a> {
    /// Text from the start of the first line to the end of the last line.
    text: &'a [u8],
    /// Start and end of each token in `text`; at least one token.
    tokens: Vec<(usize, usize)>,
    /// Line where the text begins, from 1.
    first_line: usize,
}

/// Error: an entry has an unclosed quotation mark or parenthesis.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UnclosedEntry {
    /// Line of the opening quotation mark or parenthesis, from 1.
    pub line: usize,
    pub column: usize,
    pub expected: &'static str,
}

/// Iterator over the entries of a zone file.
pub(super) struct Entries<'a> {
    rest: &'a [u8],
    line: usize,
    /// Token buffer reused from entry to entry, so that tokens need no new memory.
    tokens: Vec<(usize, usize)>,
}

impl<'a> Entries<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Entries { rest: text, line: 1, tokens: Vec::new() }
    }

    /// Returns the next entry with at least one token; `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<FileEntry<'a>>, UnclosedEntry> {
        while !self.rest.is_empty() {
            let mut tokens = std::mem::take(&mut self.tokens);
            tokens.clear();
            let first_line = self.line;
            let len = split_tokens(self.rest, &mut tokens).map_err(|(at, expected)| {
                let (line, column) = line_and_column(self.rest, at);
                UnclosedEntry { line: line + first_line - 1, column, expected }
            })?;
            let (text, rest) = self.rest.split_at(len);
            self.rest = rest;
            self.line += text.iter().filter(|&&byte| byte == b'\n').count();
            if !tokens.is_empty() {
                return Ok(Some(FileEntry { text, tokens, first_line }));
            }
            self.tokens = tokens;
        }
        Ok(None)
    }

    /// Reuses the token buffer of an entry.
    pub(super) fn recycle(&mut self, entry: FileEntry<'a>) {
        self.tokens = entry.tokens;
    }
}

/// Finds the end and the tokens of the first entry. Fails with the offset of an unclosed
/// quotation mark or parenthesis and the missing character.
fn split_tokens(
    text: &[u8],
    tokens: &mut Vec<(usize, usize)>,
) -> Result<usize, (usize, &'static str)> {
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
                at = end_of_unquoted(text, start);
                tokens.push((start, at));
            }
        }
    }
    match open {
        Some(open_at) => Err((open_at, "a closing parenthesis")),
        None => Ok(at),
    }
}

/// End of a quoted token whose content begins at `at`; `None` when the token is not closed.
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

fn end_of_unquoted(text: &[u8], start: usize) -> usize {
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

/// Line and column of the offset `at` in a text, both from 1.
fn line_and_column(text: &[u8], at: usize) -> (usize, usize) {
    let before = &text[..at.min(text.len())];
    let line = before.iter().filter(|&&byte| byte == b'\n').count() + 1;
    let start =
        before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline_at| newline_at + 1);
    (line, before.len() - start + 1)
}

impl FileEntry<'_> {
    /// Text of a token; empty when `index` is past the last token.
    pub(super) fn token(&self, index: usize) -> &[u8] {
        self.tokens.get(index).map_or(&[], |&(start, end)| &self.text[start..end])
    }

    /// Token without quotation marks and with its escapes `\DDD` and `\X` decoded; `None` for an
    /// invalid escape.
    pub(super) fn decoded_token(&self, index: usize) -> Option<Vec<u8>> {
        let token = self.token(index);
        let content = token.strip_prefix(b"\"").and_then(|token| token.strip_suffix(b"\""));
        let mut bytes = content.unwrap_or(token).iter().copied();
        let mut decoded = Vec::with_capacity(token.len());
        while let Some(byte) = bytes.next() {
            decoded.push(if byte == b'\\' { name::unescape(&mut bytes)? } else { byte });
        }
        Some(decoded)
    }

    /// True when the entry begins with an owner name or with a directive.
    fn has_owner(&self) -> bool {
        self.tokens.first().is_some_and(|&(start, _)| start == 0)
    }

    /// True when the entry is this directive, as `$INCLUDE`.
    pub(super) fn is_directive(&self, name: &[u8]) -> bool {
        self.has_owner() && self.token(0).eq_ignore_ascii_case(name)
    }

    /// Index of the token with the record type; `None` for a directive.
    pub(super) fn type_token(&self) -> Option<usize> {
        // [owner] [TTL] [class] type, or [owner] [class] [TTL] type.
        if self.has_owner() && self.token(0).starts_with(b"$") {
            return None;
        }
        let mut index = usize::from(self.has_owner());
        for _ in 0..2 {
            let token = self.token(index);
            let is_time = token.first().is_some_and(u8::is_ascii_digit);
            index += usize::from(is_time || is_class(token));
        }
        Some(index)
    }

    /// Tokens before the token `index` in the form that the scanner expects, on one line.
    pub(super) fn front(&self, index: usize) -> Vec<u8> {
        let mut front = Vec::new();
        if !self.has_owner() {
            front.push(b' ');
        }
        for at in 0..index {
            let is_owner = at == 0 && self.has_owner();
            match parse_seconds(self.token(at)).filter(|_| !is_owner) {
                Some(seconds) => front.extend_from_slice(seconds.to_string().as_bytes()),
                None => front.extend_from_slice(self.token(at)),
            }
            front.push(b' ');
        }
        front
    }

    /// Line and column of a token in the file, both from 1.
    pub(super) fn position(&self, index: usize) -> (usize, usize) {
        let at = self.tokens.get(index).map_or(self.text.len(), |&(start, _)| start);
        let (line, column) = line_and_column(self.text, at);
        (line + self.first_line - 1, column)
    }

    /// Returns the index of the token at the line and column of [`FileEntry::normalized`] where the scanner
    /// stopped: the token that the scanner is in, or has just read.
    pub(super) fn token_at_scanner_position(
        normalized: &[u8],
        line: usize,
        column: usize,
    ) -> usize {
        let mut tokens = Vec::new();
        let _ = split_tokens(normalized, &mut tokens);
        let line_start = match line.checked_sub(2) {
            None => 0,
            Some(skipped) => normalized
                .iter()
                .enumerate()
                .filter(|&(_, &byte)| byte == b'\n')
                .nth(skipped)
                .map_or(normalized.len(), |(at, _)| at + 1),
        };
        let at = line_start + column.saturating_sub(1);
        tokens.iter().take_while(|&&(start, _)| start < at).count().saturating_sub(1)
    }

    /// Text of the entry in the form that the scanner expects:
    /// * TTLs with units, which other servers allow (`1h30m`), become seconds.
    /// * A space separates a quoted token from a token directly after it. Without the space, the
    ///   scanner may lack a byte to write to.
    /// * The text ends with a line feed.
    pub(super) fn normalized(&self) -> Cow<'_, [u8]> {
        let times = self.times_with_units();
        let has_end = self.text.ends_with(b"\n");
        if times.is_empty() && has_end && !self.has_adjacent_tokens() {
            return Cow::Borrowed(self.text);
        }
        let mut normalized = Vec::with_capacity(self.text.len() + 16);
        let mut copied = 0;
        let mut times = times.into_iter().peekable();
        for (index, &(start, end)) in self.tokens.iter().enumerate() {
            normalized.extend_from_slice(&self.text[copied..start]);
            if index > 0 && self.follows_quoted_token(index) {
                normalized.push(b' ');
            }
            match times.next_if(|&(at, _)| at == index) {
                Some((_, seconds)) => normalized.extend_from_slice(seconds.to_string().as_bytes()),
                None => normalized.extend_from_slice(&self.text[start..end]),
            }
            copied = end;
        }
        normalized.extend_from_slice(&self.text[copied..]);
        if !has_end {
            normalized.push(b'\n');
        }
        Cow::Owned(normalized)
    }

    /// True when any token begins directly after a quoted token.
    fn has_adjacent_tokens(&self) -> bool {
        (1..self.tokens.len()).any(|index| self.follows_quoted_token(index))
    }

    /// True when the token `index` begins directly after a quoted token.
    fn follows_quoted_token(&self, index: usize) -> bool {
        let ((before, end), (start, _)) = (self.tokens[index - 1], self.tokens[index]);
        end == start && self.text[before] == b'"'
    }

    /// Tokens that are times with units: token index and seconds.
    fn times_with_units(&self) -> Vec<(usize, u32)> {
        let mut times = Vec::new();
        let mut add_if_time = |index: usize| {
            let seconds = parse_seconds(self.token(index));
            times.extend(seconds.map(|seconds| (index, seconds)));
            seconds.is_some()
        };
        if self.token(0).eq_ignore_ascii_case(b"$TTL") {
            add_if_time(1);
            return times;
        }
        let Some(index) = self.type_token() else { return times };
        for before in usize::from(self.has_owner())..index {
            add_if_time(before);
        }
        if self.token(index).eq_ignore_ascii_case(b"SOA") {
            // The four times of an SOA record follow two names and the serial number.
            (index + 4..index + 8).for_each(|index| {
                add_if_time(index);
            });
        }
        times
    }
}

/// True for the name of a class, also in the generic form of RFC 3597 section 5.
fn is_class(token: &[u8]) -> bool {
    let generic = token.split_at_checked(5).filter(|(name, _)| name.eq_ignore_ascii_case(b"CLASS"));
    [&b"IN"[..], b"CH", b"HS"].iter().any(|class| token.eq_ignore_ascii_case(class))
        || generic.is_some_and(|(_, number)| number.iter().all(u8::is_ascii_digit))
}

/// Converts a time with units, such as `2d12h`, to seconds; `None` for any other token.
pub(super) fn parse_seconds(token: &[u8]) -> Option<u32> {
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

    fn first_entry(text: &str) -> (Vec<String>, String) {
        let mut entries = Entries::new(text.as_bytes());
        let entry = entries.next().unwrap().unwrap();
        let tokens = (0..entry.tokens.len())
            .map(|index| String::from_utf8(entry.token(index).to_vec()).unwrap())
            .collect();
        (tokens, String::from_utf8(entry.normalized().into_owned()).unwrap())
    }

    #[test]
    fn splits_tokens_as_in_rfc_1035() {
        let (tokens, normalized) =
            first_entry("a\\ b 60 TXT (\"x ; \\\" y\"; comment\n z)\t;end\nnext");
        assert_eq!(tokens, ["a\\ b", "60", "TXT", "\"x ; \\\" y\"", "z"]);
        assert!(normalized.ends_with(";end\n"));
    }

    #[test]
    fn counts_positions_over_all_lines() {
        let mut entries = Entries::new(b"\n; c\na A (\n 1\n)\n\n b A 2\n");
        let first = entries.next().unwrap().unwrap();
        assert_eq!((first.position(0), first.position(2)), ((3, 1), (4, 2)));
        entries.recycle(first);
        let second = entries.next().unwrap().unwrap();
        assert_eq!(second.position(0), (7, 2));
        assert!(entries.next().unwrap().is_none());
    }

    #[test]
    fn reports_position_of_unclosed_delimiter() {
        let error = |text: &str| {
            let mut entries = Entries::new(text.as_bytes());
            while let Ok(Some(_)) = entries.next() {}
            entries.next().err().unwrap()
        };
        let expected = "a closing parenthesis";
        assert_eq!(error("a A 1\nb A (1\nc"), UnclosedEntry { line: 2, column: 5, expected });
        let expected = "a closing quotation mark";
        assert_eq!(error("a TXT \"x\n\\\""), UnclosedEntry { line: 1, column: 7, expected });
    }

    #[test]
    fn converts_times_with_units_to_seconds() {
        assert_eq!(first_entry("$TTL 1d").1, "$TTL 86400\n");
        assert_eq!(first_entry("w 1h IN A 192.0.2.1").1, "w 3600 IN A 192.0.2.1\n");
        assert_eq!(first_entry("w IN 1W2D3H4M5S A 192.0.2.1").1, "w IN 788645 A 192.0.2.1\n");
        assert_eq!(first_entry(" 5m TXT 1h").1, " 300 TXT 1h\n");
        assert_eq!(first_entry("1h 5m A 1h").1, "1h 300 A 1h\n");
        assert_eq!(
            first_entry("@ SOA n h (7 2h 15m 2w 1h)").1,
            "@ SOA n h (7 7200 900 1209600 3600)\n"
        );
        for token in ["1x", "h", "1h2", "12", "99999999999h", "4294967295w", "1hm"] {
            assert_eq!(parse_seconds(token.as_bytes()), None, "{token}");
        }
    }
}
