# Completes lmbench's command line in zsh. Offers file names where lmbench has no words.
_lmbench() {
    local -a words_offered=(${(f)"$($words[1] completion --words "${(@Q)words[2,CURRENT]}" 2>/dev/null)"})
    (( $#words_offered )) && compadd -a words_offered || _files
}
compdef _lmbench lmbench
