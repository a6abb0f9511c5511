// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bytes to the tokens of JSON, with their places. It takes and refuses the same as QEMU, and names the same places.

/// Where a token begins: line and column, from 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub line: usize,
    pub column: usize,
}

/// The kind of a token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    /// One of `{}[]:,`.
    Mark(u8),
    /// With its quotes and escapes.
    Text(Vec<u8>),
    Number(Vec<u8>),
    /// Small letters.
    Word(Vec<u8>),
    /// Bytes that begin no token, or end one too early: all of its bytes so far.
    Stray(Vec<u8>),
    /// More bytes than one token may have.
    TooLong,
}

/// A token and its place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    pub kind: Kind,
    pub place: Position,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LexerState {
    /// Between tokens.
    Start,
    /// Behind a stray one: up to the next mark, line end or control character nothing is taken.
    Recovery,
    Text {
        quote: u8,
        escaped: bool,
    },
    Number(Digits),
    Word,
}

/// The place within a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Digits {
    Sign,
    Zero,
    Whole,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    Power,
}

impl Digits {
    /// The state behind this byte; `None` where the number ends before it, an error where it may not.
    fn next(self, byte: u8) -> Result<Option<Digits>, ()> {
        Ok(Some(match (self, byte) {
            (Digits::Sign, b'0') => Digits::Zero,
            (Digits::Sign, b'1'..=b'9') | (Digits::Whole, b'0'..=b'9') => Digits::Whole,
            (Digits::Zero, b'0'..=b'9') => return Err(()),
            (Digits::Zero | Digits::Whole, b'.') => Digits::Point,
            (Digits::Point | Digits::Fraction, b'0'..=b'9') => Digits::Fraction,
            (Digits::Zero | Digits::Whole | Digits::Fraction, b'e' | b'E') => Digits::Exponent,
            (Digits::Exponent, b'+' | b'-') => Digits::ExponentSign,
            (Digits::Exponent | Digits::ExponentSign | Digits::Power, b'0'..=b'9') => Digits::Power,
            (Digits::Zero | Digits::Whole | Digits::Fraction | Digits::Power, _) => return Ok(None),
            _ => return Err(()),
        }))
    }
}

/// Cuts a stream of bytes into tokens.
#[derive(Debug)]
pub(crate) struct Lexer {
    state: LexerState,
    text: Vec<u8>,
    /// The place of the byte that comes next.
    place: Position,
    /// The start of the open token.
    start: Position,
    limit: usize,
}

impl Lexer {
    /// `limit`: most bytes of one token.
    pub fn new(limit: usize) -> Self {
        let place = Position { line: 1, column: 1 };
        Lexer { state: LexerState::Start, text: Vec::new(), place, start: place, limit }
    }

    /// Takes a byte; up to two tokens are complete with it.
    pub fn take(&mut self, byte: u8) -> [Option<Token>; 2] {
        let found = self.step(byte);
        self.place = match byte {
            b'\n' => Position { line: self.place.line.saturating_add(1), column: 1 },
            _ => Position { column: self.place.column.saturating_add(1), ..self.place },
        };
        found
    }

    /// Takes the bytes in the middle of a text at the start of these; how many they are.
    pub fn take_text(&mut self, bytes: &[u8]) -> usize {
        let LexerState::Text { quote, escaped: false } = self.state else { return 0 };
        let room = self.limit - self.text.len().min(self.limit);
        let ends = |&byte: &u8| byte == quote || byte == b'\\' || is_reset(byte);
        let len = bytes.iter().take(room).position(ends).unwrap_or(bytes.len().min(room));
        self.text.extend_from_slice(&bytes[..len]);
        self.place.column = self.place.column.saturating_add(len);
        len
    }

    /// The end of the input: the number or word that is complete with it, or else the incomplete text, and the place of
    /// the end.
    pub fn finish(&mut self) -> (Option<Token>, Position) {
        let mut end = self.place;
        let token = match self.state {
            LexerState::Start | LexerState::Recovery => None,
            LexerState::Number(digits) if digits.next(b' ') == Ok(None) => Some(self.end_plain()),
            LexerState::Word => Some(self.end_plain()),
            LexerState::Number(_) | LexerState::Text { .. } => Some(self.stray()),
        };
        if token.is_some() {
            end.column = end.column.saturating_add(1);
        }
        (token, end)
    }

    fn step(&mut self, byte: u8) -> [Option<Token>; 2] {
        if self.text.len() >= self.limit {
            self.text = Vec::new();
            self.state = LexerState::Recovery;
            return [Some(Token { kind: Kind::TooLong, place: self.start }), None];
        }
        match self.state {
            LexerState::Start => [self.begin(byte), None],
            LexerState::Recovery => [self.recover(byte), None],
            LexerState::Text { quote, escaped } => [self.go_on_in_text(byte, quote, escaped), None],
            LexerState::Number(digits) => match digits.next(byte) {
                Ok(Some(next)) => {
                    self.text.push(byte);
                    self.state = LexerState::Number(next);
                    [None, None]
                }
                Ok(None) => [Some(self.end_plain()), self.begin_behind(byte)],
                Err(()) => {
                    self.text.push(byte);
                    [Some(self.stray()), None]
                }
            },
            LexerState::Word if byte.is_ascii_lowercase() => {
                self.text.push(byte);
                [None, None]
            }
            LexerState::Word => [Some(self.end_plain()), self.begin_behind(byte)],
        }
    }

    /// A byte that ended another token: QEMU counts it twice.
    fn begin_behind(&mut self, byte: u8) -> Option<Token> {
        self.begin_at(Position { column: self.place.column.saturating_add(1), ..self.place }, byte)
    }

    fn begin(&mut self, byte: u8) -> Option<Token> {
        self.begin_at(self.place, byte)
    }

    fn begin_at(&mut self, place: Position, byte: u8) -> Option<Token> {
        self.start = place;
        self.state = match byte {
            b' ' | b'\t' | b'\r' | b'\n' => return None,
            b'{' | b'}' | b'[' | b']' | b':' | b',' => return Some(self.token(Kind::Mark(byte))),
            b'"' | b'\'' => LexerState::Text { quote: byte, escaped: false },
            b'-' => LexerState::Number(Digits::Sign),
            b'0' => LexerState::Number(Digits::Zero),
            b'1'..=b'9' => LexerState::Number(Digits::Whole),
            b'a'..=b'z' => LexerState::Word,
            _ => {
                self.text.push(byte);
                return Some(self.stray());
            }
        };
        self.text.push(byte);
        None
    }

    fn recover(&mut self, byte: u8) -> Option<Token> {
        self.start = Position { column: self.place.column.saturating_add(1), ..self.place };
        match byte {
            b'\n' | b'\r' => self.state = LexerState::Start,
            b'{' | b'}' | b'[' | b']' | b':' | b',' => {
                self.state = LexerState::Start;
                return Some(self.token(Kind::Mark(byte)));
            }
            _ if is_reset(byte) && byte != b'\t' => {
                self.text.push(byte);
                return Some(self.stray());
            }
            _ => {}
        }
        None
    }

    fn go_on_in_text(&mut self, byte: u8, quote: u8, escaped: bool) -> Option<Token> {
        self.text.push(byte);
        if is_reset(byte) {
            return Some(self.stray());
        }
        if !escaped && byte == quote {
            self.state = LexerState::Start;
            let text = std::mem::take(&mut self.text);
            return Some(self.token(Kind::Text(text)));
        }
        self.state = LexerState::Text { quote, escaped: !escaped && byte == b'\\' };
        None
    }

    fn end_plain(&mut self) -> Token {
        let text = std::mem::take(&mut self.text);
        let kind = if self.state == LexerState::Word { Kind::Word(text) } else { Kind::Number(text) };
        self.state = LexerState::Start;
        self.token(kind)
    }

    fn stray(&mut self) -> Token {
        self.state = LexerState::Recovery;
        let text = std::mem::take(&mut self.text);
        self.token(Kind::Stray(text))
    }

    fn token(&self, kind: Kind) -> Token {
        Token { kind, place: self.start }
    }
}

/// Bytes that no text holds.
fn is_reset(byte: u8) -> bool {
    !(b' '..0xfe).contains(&byte)
}
