//! Numbers of README.md and of the pages under docs. A line may end with `<!-- figures: EXPRESSION; EXPRESSION -->`: what each
//! expression gives must stand in the line.

use minijinja::Environment;
use minijinja::value::Value;

use super::text_of;

const MARK: &str = "<!-- figures:";
const END: &str = "-->";

/// Compares every marked line of `text`, which is the file `name`. Adds to the problems, and to the
/// warnings what has no result.
pub(super) fn compare(
    name: &str,
    text: &str,
    environment: &Environment<'_>,
    context: &Value,
    (problems, warnings): (&mut Vec<String>, &mut Vec<String>),
) {
    for (index, line) in text.lines().enumerate() {
        let place = format!("{name}:{}", index + 1);
        let Some((shown, comment)) = line.split_once(MARK) else { continue };
        let Some(expressions) = comment.trim_end().strip_suffix(END) else {
            problems.push(format!("{place}: the comment of the figures must end the line"));
            continue;
        };
        for expression in expressions.split(';').map(str::trim) {
            match evaluate(expression, environment, context) {
                Ok(Some(value)) if has_number(shown, &value) => {}
                Ok(Some(value)) => {
                    problems.push(format!("{place}: {value} is missing, of {expression}"));
                }
                Ok(None) => warnings.push(format!("{place}: no result for {expression}")),
                Err(error) => problems.push(format!("{place}: {expression}: {error:#}")),
            }
        }
    }
}

/// Value of an expression; `None` if an experiment that it names has no result.
fn evaluate(
    expression: &str,
    environment: &Environment<'_>,
    context: &Value,
) -> Result<Option<String>, minijinja::Error> {
    let compiled = environment.compile_expression(expression)?;
    let globals: Vec<&str> = environment.globals().map(|(name, _)| name).collect();
    let names = compiled.undeclared_variables(false);
    for name in names.iter().filter(|name| !globals.contains(&name.as_str())) {
        if context.get_attr(name)?.is_undefined() {
            return Ok(None);
        }
    }
    compiled.eval(context).map(|value| Some(text_of(&value)))
}

/// True if `number` stands in `text`, and not as a part of another number.
fn has_number(text: &str, number: &str) -> bool {
    let belongs = |c: char| c.is_ascii_digit() || c == '.' || c == ',';
    text.match_indices(number).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let mut after = text[at + number.len()..].chars();
        // A point or comma after the number may end a sentence or a clause.
        let continues = match after.next() {
            Some('.' | ',') => after.next().is_some_and(|c| c.is_ascii_digit()),
            next => next.is_some_and(belongs),
        };
        !before.is_some_and(belongs) && !continues
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_whole_numbers_only() {
        assert!(has_number("| 1,213 | 572 |", "572"));
        assert!(has_number("It is 2.1, or more.", "2.1"));
        assert!(has_number("12 and 2", "2"));
        for text in ["1,213", "12", "21", "2.1", "2,000", ""] {
            assert!(!has_number(text, "2"), "{text}");
        }
    }
}
